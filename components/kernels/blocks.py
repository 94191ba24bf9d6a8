"""Many tensors in one launch: a program a block, which finds its tensor by address.

Beside the tensors lies a flat buffer that has room for all of them, one after another.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

BLOCK = 4096  # elements a program
ALIGNMENT = 16  # bytes of addresses, elements of sizes


@final
class Blocks:
    """The blocks of tensors of given sizes, in a table on the device."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = list(sizes)
        self.aligned = all(size % ALIGNMENT == 0 for size in self._sizes)
        self._table: tuple[Tensor, ...] | None = None

    def table(self, device: torch.device) -> tuple[Tensor, ...]:
        """Of every block, int64: number of the tensor, place in it, place in the flat buffer, elements."""
        if self._table is None:
            rows, start = [], 0
            for number, size in enumerate(self._sizes):
                rows += [(number, i, start + i, min(BLOCK, size - i)) for i in range(0, size, BLOCK)]
                start += size
            self._table = _on(device, torch.tensor(rows, dtype=torch.int64).T.contiguous()).unbind()
        return self._table


@final
class Addresses:
    """Where tensors begin, in a list on the device that is sent anew only when one of them has moved."""

    def __init__(self):
        self._known: list[int] = []
        self._sent: Tensor | None = None
        self.aligned = True

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """int64, one for each; `aligned` tells of the same ones."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._known:
            self._known, self._sent = addresses, _on(tensors[0].device, torch.tensor(addresses, dtype=torch.int64))
            self.aligned = all(address % ALIGNMENT == 0 for address in addresses)
        return self._sent


def dense(tensors: Sequence[Tensor]) -> bool:
    """Whether a launch can take them: fp32, each without gaps."""
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _on(device: torch.device, table: Tensor) -> Tensor:
    """The host does not wait for the copy."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
