"""The last pass of an orthogonalising optimizer over its weights: update and weight decay, many tensors at once.

On CUDA one kernel finds the weights by their addresses, in a table on the device that is made anew only when one of
them has moved. Left out on purpose: the same for momentum, which torch's foreach functions serve well.
"""

from collections.abc import Sequence
from typing import final

import torch
import triton.language as tl
from torch import Tensor

from components.kernels.decayed_update.kernels import decayed_update
from components.kernels.decayed_update.reference import decayed_update_reference

BLOCK = 4096  # weights a program


@final
class DecayedUpdate:
    """w <- w - lr (u + decay w) for tensors of given sizes, each call on the same ones."""

    def __init__(self, sizes: Sequence[int]):
        """`sizes`: elements of each tensor."""
        self._sizes = list(sizes)
        self._addresses: list[int] = []
        self._blocks: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, weights: Sequence[Tensor], update: Tensor, lr: float, decay: float, cautious: bool) -> None:
        """In place, the decay only where u w > 0 if `cautious`. `update`: flat, the u of all weights one after another,
        in any dtype; the sum is done in the weights'."""
        dense = all(w.dtype == torch.float32 and w.is_contiguous() for w in weights)
        if weights and dense and update.is_cuda:
            self.launch(weights, update, lr, decay, cautious)
        else:
            decayed_update_reference(weights, update, lr, decay, cautious)

    def launch(self, weights: Sequence[Tensor], update: Tensor, lr: float, decay: float, cautious: bool) -> None:
        """The Triton form: fp32 weights, each contiguous."""
        addresses = [w.data_ptr() for w in weights]
        if addresses != self._addresses:
            self._blocks, self._addresses = _table(addresses, self._sizes, update.device), addresses
        decayed_update[(len(self._blocks[0]),)](
            *self._blocks,
            update,
            float(lr),
            float(decay),
            CAUTIOUS=cautious,
            ALIGNED=all(address % 16 == 0 for address in addresses) and all(size % 16 == 0 for size in self._sizes),
            DTYPE=tl.float32,
            BLOCK=BLOCK,
            num_warps=8,
        )


def _table(addresses: Sequence[int], sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Address of the first weight, place of its update and number of weights, int64, for every block of every tensor.
    The host does not wait for the copy."""
    rows, start = [], 0
    for address, size in zip(addresses, sizes, strict=True):
        rows += [(address + 4 * i, start + i, min(BLOCK, size - i)) for i in range(0, size, BLOCK)]
        start += size
    table = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True).unbind()
