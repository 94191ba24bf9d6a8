"""Parts of many tensors in one launch: a program a block, which finds its tensor by address.

Beside the tensors lies a flat buffer that has room for all of the parts.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

BLOCK = 4096  # elements a program
ALIGNMENT = 16  # bytes of addresses, elements of sizes


class Part(NamedTuple):
    """A part of one of several tensors, and where its elements lie in the flat buffer."""

    tensor: int
    index: tuple[int | slice, ...]
    start: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part, as a view."""
        return tensors[self.tensor][self.index]


@final
class Blocks:
    """The blocks of given parts, in a table on the device. The tensors may move, but keep their shapes."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = tuple(parts)
        self.aligned = True
        self._table: tuple[Tensor, ...] | None = None
        self._gapless: bool | None = None

    def dense(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a launch can take the parts of `tensors`: fp32, and nothing has gaps."""
        if not all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
            return False
        if self._gapless is None:
            self._gapless = all(part.of(tensors).is_contiguous() for part in self.parts)
        return self._gapless

    def table(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of every block, int64: number of the tensor, place in it, place in the flat buffer, elements. `aligned` tells
        of the same blocks."""
        if self._table is None:
            rows = []
            for part in self.parts:
                view = part.of(tensors)
                offset, size = view.storage_offset() - tensors[part.tensor].storage_offset(), view.numel()
                blocks = range(0, size, BLOCK)
                rows += [(part.tensor, offset + i, part.start + i, min(BLOCK, size - i)) for i in blocks]
            self.aligned = all(number % ALIGNMENT == 0 for row in rows for number in row[1:])
            self._table = _on(tensors[0].device, torch.tensor(rows, dtype=torch.int64).T.contiguous()).unbind()
        return self._table

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of `tensors`."""
        return [part.of(tensors) for part in self.parts]

    def beside(self, flat: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
        """Where the parts, of which `views` tells the shapes, lie in the flat buffer."""
        return [flat[p.start : p.start + v.numel()].view(v.shape) for p, v in zip(self.parts, views, strict=True)]


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


def _on(device: torch.device, table: Tensor) -> Tensor:
    """The host does not wait for the copy."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
