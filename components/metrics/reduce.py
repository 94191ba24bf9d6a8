"""All numbers of a logged step over all ranks: one tensor, one all-reduce, one wait of the host for the device.

Only sums travel; averages are made of sums and counts afterwards, so that they weigh tokens and not ranks. A part keeps
its statistics on the device until a step is logged, and no step waits for them.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

Scalars = Mapping[str, Tensor | float]
Reduced = dict[str, float | list[float]]


@torch.no_grad()
def reduce_scalars(
    sums: Scalars, same: Scalars | None = None, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> Reduced:
    """`sums` added over ranks, `same` as rank 0 has it: a float for each number, a list for each vector.

    Every rank gives the same names and shapes. Values are scalars or 1-D tensors of any dtype, on `device` or the
    host; they travel in fp64, which holds token counts exactly. The result is the same on every rank.
    """
    first = dist.get_rank(group) == 0
    values = [_flat(value, device) for value in sums.values()]
    # Added to zeros, rank 0's value arrives unchanged; multiplying by 0 would turn inf to nan.
    values += [(v if first else torch.zeros_like(v)) for v in (_flat(value, device) for value in (same or {}).values())]
    if not values:
        return {}
    packed = torch.cat(values)
    dist.all_reduce(packed, group=group)
    parts = torch.split(packed.cpu(), [len(value) for value in values])
    named = zip((*sums.items(), *(same or {}).items()), parts, strict=True)
    return {name: part.tolist() if _is_vector(value) else part.item() for (name, value), part in named}


def _flat(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(-1)


def _is_vector(value: Tensor | float) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
