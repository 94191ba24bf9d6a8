"""Moving parts of matrices between ranks: one `all_to_all_single` with uneven splits.

Every rank works out the same list of transfers; each side of a pair orders what passes between them alike, so that no
index travels. A rank that sends or receives nothing takes part with empty splits.
"""

import math
from collections.abc import Iterable, Sequence
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
        self._splits_out = [elements(t for t in self.sent if t.target == r) for r in range(ranks)]
        self._splits_in = [elements(t for t in self.received if t.source == r) for r in range(ranks)]
        self.leaving, self.arriving = sum(self._splits_out), sum(self._splits_in)  # elements

    def start(self, outgoing: Tensor, incoming: Tensor) -> dist.Work | None:
        """Send what is at the beginning of one flat buffer, to arrive at that of the other. Returns before it has what
        to `wait` for: None on one rank, where both are one buffer."""
        if len(self._splits_in) == 1:
            return None
        there, here = incoming[: self.arriving], outgoing[: self.leaving]
        return dist.all_to_all_single(there, here, self._splits_in, self._splits_out, async_op=True)


def wait(work: dist.Work | None) -> None:
    """For what `Exchange.start` began; on CUDA the current stream does, not the host."""
    if work is not None:
        work.wait()


def elements(transfers: Iterable[Transfer]) -> int:
    """How many there are in all rectangles."""
    return sum(math.prod(t.region.size) for t in transfers)


def split(buffer: Tensor, transfers: Sequence[Transfer]) -> list[Tensor]:
    """The beginning of a flat buffer as one view for each transfer, in its rectangle's shape."""
    sizes = [elements([t]) for t in transfers]
    parts = buffer[: sum(sizes)].split(sizes) if sizes else ()
    return [part.view(t.region.size) for part, t in zip(parts, transfers, strict=True)]


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Of each pair the second into the first, in few kernels."""
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
