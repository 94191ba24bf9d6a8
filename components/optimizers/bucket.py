"""Buckets: the matrices of an orthogonalising optimizer that travel together, and the memory they travel through.

Everything that does not change between steps is worked out once: who sends what to whom, where it lies in flat buffers,
where its weights and its momentum lie in their tensors. A view of every matrix in every step would take the host longer
than two GPUs take for the step.
Shapes: N matrices of one shape.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

import torch.distributed as dist
from torch import Tensor

from components.kernels.blocks import Part
from components.kernels.decayed_update.op import DecayedUpdate
from components.kernels.momentum.op import Momentum
from components.optimizers import base
from components.optimizers.base import copies
from components.optimizers.distribution import Owners, cost
from components.optimizers.exchange import (
    Exchange,
    Holdings,
    Region,
    Transfer,
    copy_all,
    elements,
    homeward,
    outward,
    split,
)
from components.parameters import Logical, OwnedParameter, local_region

BATCH_ELEMENTS = 2**26  # of a rank's share; bounds the memory of a step, far above what fills a GPU
BUCKET_ELEMENTS = 2**24  # of a rank's share, with which a bucket is full: launching it costs less than moving it

Placed = list[tuple[Transfer, Tensor]]  # where each lies in a flat buffer


@dataclass(frozen=True)
class Matrix:
    """A logical matrix: the position of its parameter in the role, and where this rank's part lies in local storage."""

    parameter: int
    owned: OwnedParameter
    logical: Logical
    index: tuple[int | slice, ...] | None
    region: Region | None

    @property
    def name(self) -> str:
        return self.owned.logical_name(self.logical)

    @property
    def shape(self) -> tuple[int, int]:
        """As stored: (in, out) where the role is transposed."""
        return self.logical.shape(tuple(self.owned.parameter.shape))

    @property
    def kind(self) -> tuple:
        """What matrices of one batch share."""
        return self.shape, self.owned.role.transposed, copies(self.owned.parameter)


@final
class Batch:
    """Matrices of one shape and layout, orthogonalised together. `mine`: those that this rank owns, by number."""

    def __init__(self, mine: dict[int, Matrix]):
        self.mine = mine
        self.shape, self.transposed, _ = next(iter(mine.values())).kind

    @property
    def oriented(self) -> tuple[int, int]:
        """(out, in)."""
        return self.shape[::-1] if self.transposed else self.shape

    def oriented_view(self, stack: Tensor) -> Tensor:
        """Matrices as stored, (N, *shape), seen as (N, out, in)."""
        return stack.mT if self.transposed else stack


@final
class Bucket:
    """Batches that travel together, their matrices numbered through, and the flat buffers they travel between.

    `held` has room for what this rank holds of the matrices, `owned` for the matrices it owns. Momentum goes out from
    `held` to `owned`, and the update comes home the other way. On one rank both are one buffer, where the matrices lie
    whole and in order.
    """

    def __init__(
        self, batches: Sequence[Sequence[Matrix]], holdings: Sequence[Holdings], owners: Owners, rank: int, like: Tensor
    ):
        """`holdings` and `owners` by number; buffers of the dtype and on the device of `like`."""
        self._matrices = [matrix for batch in batches for matrix in batch]
        self.copies, ranks = copies(self._matrices[0].owned.parameter), len(holdings[0])
        number = count()
        numbered = [{next(number): matrix for matrix in batch} for batch in batches]
        mine = [{i: m for i, m in batch.items() if rank in owners[i]} for batch in numbered]
        self.batches = [Batch(matrices) for matrices in mine if matrices]  # without those that are all others'
        routes = list(enumerate(zip(holdings, owners, strict=True)))
        self.outward = Exchange([t for i, (h, o) in routes for t in outward(i, h, o)], rank, ranks)
        self.homeward = Exchange([t for i, (h, o) in routes for t in homeward(i, h, o)], rank, ranks)
        # What another replica sends is averaged here too, and lies behind what travels.
        sent, held = {t.matrix for t in self.outward.sent}, {i: h[rank] for i, h in enumerate(holdings) if h[rank]}
        rest = [Transfer(rank, rank, i, region) for i, region in held.items() if i not in sent]
        self._make_buffers(like, [*self.outward.sent, *rest], alone=ranks == 1)
        self._plan_passes([*self.outward.sent, *rest])

    def _make_buffers(self, like: Tensor, leaving: Sequence[Transfer], alone: bool) -> None:
        """The buffers, and `owned` in views of what arrives and of what goes home."""
        self.held = like.new_zeros(max(elements(leaving), self.homeward.arriving))
        size = max(self.outward.arriving, self.homeward.leaving)
        self._alone, self.owned = alone, self.held if alone else like.new_zeros(size)
        self._arriving = _placed(self.owned, self.outward.received)
        self._returning = _placed(self.owned, self.homeward.sent)

    def _plan_passes(self, leaving: Sequence[Transfer]) -> None:
        """Momentum and update of this rank's parts; copies of what goes to several owners."""
        places = _placed(self.held, leaving)
        written = {t.matrix: place for t, place in places}
        self._repeats = [(place, written[t.matrix]) for t, place in places if place is not written[t.matrix]]
        self._parameters = sorted({self._matrices[i].parameter for i in written})
        self._momentum = Momentum([self._part(i, place) for i, place in written.items()])
        self._update = DecayedUpdate([self._part(t.matrix, p) for t, p in _placed(self.held, self.homeward.received)])

    def _part(self, number: int, place: Tensor) -> Part:
        matrix = self._matrices[number]
        return Part(self._parameters.index(matrix.parameter), matrix.index, place.storage_offset())

    def _of(self, storages: Sequence[Tensor]) -> list[Tensor]:
        """The parameters with parts in this bucket, of all of the role."""
        return [storages[parameter] for parameter in self._parameters]

    def send_out(
        self, momenta: Sequence[Tensor], gradients: Sequence[Tensor], kept: float, nesterov: bool
    ) -> dist.Work | None:
        """Average the gradients into the momenta, of all parameters of the role; what is to be orthogonalised goes to
        the owners."""
        self._momentum(self._of(momenta), self._of(gradients), self.held, kept, nesterov)
        copy_all(self._repeats)
        return self.outward.start(self.held, self.owned)

    def send_home(self) -> dist.Work | None:
        """What was `put_back` goes to those who hold it."""
        return self.homeward.start(self.owned, self.held)

    @property
    def update(self) -> Tensor:
        """What came home, flat."""
        return self.held[: self.homeward.arriving]

    def apply(self, weights: Sequence[Tensor], lr: float, decay: float, cautious: bool) -> None:
        """Update and decay the weights, of all parameters of the role, with what came home."""
        self._update(self._of(weights), self.held, lr, decay, cautious)

    def stacks(self) -> list[Tensor]:
        """Of each batch the matrices as stored, (N, *shape), from their parts that arrived in `owned`."""
        sizes = [len(batch.mine) * math.prod(batch.shape) for batch in self.batches]
        flat = self.owned if self._alone else self.owned.new_empty(sum(sizes))
        views = flat.split(sizes) if sizes else ()
        stacks = [v.view(len(b.mine), *b.shape) for v, b in zip(views, self.batches, strict=True)]
        if not self._alone:
            copy_all([(rectangle, part) for part, rectangle in self._rectangles(self._arriving, stacks)])
        return stacks

    def put_back(self, stacks: Sequence[Tensor]) -> None:
        """Updates, laid out as `stacks`, in the place of what arrived: for `send_home`."""
        if not self._alone:
            copy_all(self._rectangles(self._returning, stacks))

    def _rectangles(self, parts: Placed, stacks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each part in `owned` with where it belongs in `stacks`."""
        whole = {}
        for batch, stack in zip(self.batches, stacks, strict=True):
            whole |= zip(batch.mine, stack, strict=True)
        return [(place, t.region.of(whole[t.matrix])) for t, place in parts]


def _placed(buffer: Tensor, transfers: Sequence[Transfer]) -> Placed:
    return list(zip(transfers, split(buffer, transfers), strict=True))


def matrices_of(parameters: Sequence[OwnedParameter]) -> list[Matrix]:
    """Every logical matrix, in order of definition; ValueError for a logical tensor that is not one."""
    found = []
    for position, owned in enumerate(parameters):
        for logical in owned.role.logical:
            shape = logical.shape(tuple(owned.parameter.shape))
            if len(shape) != 2:
                raise ValueError(
                    f"{owned.logical_name(logical)} has shape {shape} and role {owned.role.name!r}, but only matrices "
                    "can be orthogonalised; declare its logical matrices one by one or give the role adamw"
                )
            index, region = None, None
            if (place := local_region(owned.parameter, logical)) is not None:
                index, offset = place
                region = Region(offset, tuple(base.local(owned.parameter)[index].shape))
            found.append(Matrix(position, owned, logical, index, region))
    return found


def buckets_of(matrices: list[Matrix], owners: Owners, like: Tensor) -> list[Bucket]:
    """Matrices of a kind together, as many as the bound on a rank's share allows, and small batches with each other."""
    ranks, rank = base.ranks(), dist.get_rank() if dist.is_initialized() else 0
    by_rank: list[list[Region | None]] = [[m.region for m in matrices]]
    if ranks > 1:
        by_rank = [[] for _ in range(ranks)]
        dist.all_gather_object(by_rank, [m.region for m in matrices])
    buckets = []
    for batches in _together(_batches(matrices, ranks), matrices, ranks):
        chosen = [i for batch in batches for i in batch]
        holdings = [[held[i] for held in by_rank] for i in chosen]
        members = [[matrices[i] for i in batch] for batch in batches]
        buckets.append(Bucket(members, holdings, [owners[i] for i in chosen], rank, like))
    return buckets


def _batches(matrices: list[Matrix], ranks: int) -> Iterator[list[int]]:
    """Positions of matrices of a kind, in numbers that the bound on a rank's share allows."""
    kinds: dict[tuple, list[int]] = {}
    for number, matrix in enumerate(matrices):
        kinds.setdefault(matrix.kind, []).append(number)
    # Costliest first: the device then has work while the host gets the many small ones ready.
    for (shape, *_), numbers in sorted(kinds.items(), key=lambda kind: -len(kind[1]) * cost(kind[0][0])):
        limit = max(1, BATCH_ELEMENTS * ranks // math.prod(shape))
        yield from (numbers[i : i + limit] for i in range(0, len(numbers), limit))


def _together(batches: Iterable[list[int]], matrices: list[Matrix], ranks: int) -> Iterator[list[list[int]]]:
    """Batches whose parameters are copied alike, in order, until a bucket is full."""
    by_copies: dict[int, list[list[int]]] = {}
    for batch in batches:
        copied = copies(matrices[batch[0]].owned.parameter)
        bucket = by_copies.setdefault(copied, [])
        bucket.append(batch)
        if sum(math.prod(matrices[i].shape) for b in bucket for i in b) >= BUCKET_ELEMENTS * ranks:
            yield by_copies.pop(copied)
    yield from by_copies.values()
