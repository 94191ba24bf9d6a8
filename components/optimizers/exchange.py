"""Moving parts of matrices between ranks: one `all_to_all_single` with uneven splits.

Every rank works out the same list of transfers; each side of a pair orders what passes between them alike, so that no
index travels. A rank that sends or receives nothing takes part with empty splits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor


class Region(NamedTuple):
    """A rectangle of a matrix."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, matrix: Tensor) -> Tensor:
        """The rectangle, as a view."""
        return matrix[tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))]


class Transfer(NamedTuple):
    """One rectangle of one matrix on its way from a rank to a rank, possibly the same."""

    source: int
    target: int
    matrix: int
    region: Region


Holdings = Sequence[Region | None]  # what each rank holds of one matrix


def outward(matrix: int, holdings: Holdings, owners: Sequence[int]) -> list[Transfer]:
    """Every rectangle to every owner, from the owner itself where it holds it and the lowest other holder if not."""
    holders: dict[Region, list[int]] = {}
    for rank, region in enumerate(holdings):
        if region is not None:
            holders.setdefault(region, []).append(rank)
    return [
        Transfer(owner if owner in ranks else ranks[0], owner, matrix, region)
        for owner in owners
        for region, ranks in holders.items()
    ]


def homeward(matrix: int, holdings: Holdings, owners: Sequence[int]) -> list[Transfer]:
    """To every holder what it holds, from itself where it is an owner."""
    return [
        Transfer(rank if rank in owners else owners[0], rank, matrix, region)
        for rank, region in enumerate(holdings)
        if region is not None
    ]


@final
class Exchange:
    """A fixed list of transfers, seen from one rank. `sent` and `received` are in the order of the buffers."""

    def __init__(self, transfers: Sequence[Transfer], rank: int, ranks: int):
        self.sent = sorted((t for t in transfers if t.source == rank), key=lambda t: t[1:])
        self.received = sorted((t for t in transfers if t.target == rank), key=lambda t: (t.source, *t[2:]))
        self._splits_out = [sum(_elements(t) for t in self.sent if t.target == r) for r in range(ranks)]
        self._splits_in = [sum(_elements(t) for t in self.received if t.source == r) for r in range(ranks)]

    @property
    def arriving(self) -> int:
        """Elements that this rank receives."""
        return sum(self._splits_in)

    def start(self, parts: Sequence[Tensor], incoming: Tensor) -> "InFlight":
        """Send `parts`, one for each of `sent`, in the dtype of `incoming`, a flat buffer for what this rank receives;
        returns before it has arrived."""
        outgoing = incoming.new_empty(sum(self._splits_out))
        copy_all(split(outgoing, self.sent), parts)
        work = dist.all_to_all_single(incoming, outgoing, self._splits_in, self._splits_out, async_op=True)
        return InFlight(incoming, work, outgoing)


@dataclass(frozen=True)
class InFlight:
    """A buffer that is arriving; what is being sent is kept alive as long."""

    buffer: Tensor
    work: dist.Work | None
    outgoing: Tensor | None = None

    def wait(self) -> Tensor:
        """The flat buffer, once it may be used (on CUDA: by the current stream; the host does not wait)."""
        if self.work is not None:
            self.work.wait()
        return self.buffer


def split(buffer: Tensor, transfers: Sequence[Transfer]) -> list[Tensor]:
    """The flat buffer as one view for each transfer, in its rectangle's shape."""
    parts = buffer.split([_elements(t) for t in transfers]) if transfers else ()
    return [part.view(t.region.size) for part, t in zip(parts, transfers, strict=True)]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _elements(transfer: Transfer) -> int:
    return math.prod(transfer.region.size)
