"""Optimizers that orthogonalise whole matrices: the machinery that Muon and NorMuon share.

N matrices of one shape, m output neurons, n inputs. A step, for every logical matrix of the role:

    momentum on the local shard -> whole matrix to its owner -> Newton-Schulz -> (NorMuon: rows) -> scale -> back to
    the shards -> weight decay and update

Matrices of one shape and layout form a bucket: one exchange, one batched Newton-Schulz. While a bucket is computed,
the next one's momentum and the last one's update are under way. On one rank nothing moves, but what would travel is
rounded as if it did, so that any number of ranks computes the same.

Storage is not meaning: folded projections and folded experts are orthogonalised logical matrix by logical matrix, and
the rows of a (in, out) layout are its columns.

A step reads and writes as little as it can: momentum is met once, what is done to rows is worked out on their norms and
is one factor a row, and the weights are met once.

What an owner computes between the exchanges can be recorded as CUDA graphs, one a bucket. They read and write buffers
and row statistics of the optimizer's own, so they ask nothing of a plan: weights and gradients may lie anywhere, and
every number of ranks has them. Rates, weight decay and measurements stay outside.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from components.kernels.decayed_update.op import DecayedUpdate
from components.kernels.momentum.op import Momentum
from components.kernels.newton_schulz.op import newton_schulz, scale
from components.optimizers import base
from components.optimizers.base import Capture, RoleOptimizer, StateView, copies
from components.optimizers.distribution import PLANS, LoadReport, Owners, cost, load_report
from components.optimizers.exchange import Exchange, Holdings, InFlight, Region, copy_all, homeward, outward, split
from components.optimizers.stopwatch import Stopwatch
from components.parameters import Logical, OwnedParameter, local_region

BUCKET_ELEMENTS = 2**26  # of a rank's share; bounds the memory of a step, far above what fills a GPU


@dataclass(frozen=True, kw_only=True)
class OrthogonalConfig:
    lr: float  # peak learning rate, in the convention of `scale`
    momentum: float = 0.95  # decay of the moving average of gradients
    weight_decay: float = 0.0  # decoupled: lr * weight_decay of the weight a step
    cautious: bool = False  # decay only where update and weight agree in sign
    nesterov: bool = False  # orthogonalise the momentum looked one step ahead
    scale: Literal["spectral", "rms"] = "spectral"  # sqrt(max(1, out/in)), or 0.2 sqrt(max(out, in)) for AdamW's rates
    ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"  # of Newton-Schulz and of what travels
    distribution: Literal["round_robin", "unsorted", "balanced", "naive"] = "round_robin"  # who orthogonalises what

    def __post_init__(self):
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.lr < 0 or self.weight_decay < 0:
            raise ValueError("lr and weight_decay must be 0 or more")


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
        """What matrices of one bucket share."""
        return self.shape, self.owned.role.transposed, copies(self.owned.parameter)


@final
class Bucket:
    """Matrices of one shape and layout. `matrices` are numbered in the bucket; `mine` lists those this rank owns."""

    def __init__(self, matrices: Sequence[Matrix], holdings: Sequence[Holdings], owners: Owners, rank: int):
        self.matrices = tuple(matrices)
        self.mine = [i for i, ranks in enumerate(owners) if rank in ranks]
        self.shape, self.transposed, self.copies = matrices[0].kind
        routes = list(enumerate(zip(holdings, owners, strict=True)))
        self.outward = Exchange([t for i, (h, o) in routes for t in outward(i, h, o)], rank, len(holdings[0]))
        self.homeward = Exchange([t for i, (h, o) in routes for t in homeward(i, h, o)], rank, len(holdings[0]))
        # Elements of what this rank holds, by matrix.
        self._sizes = {i: math.prod(m.region.size) for i, m in enumerate(matrices) if m.region is not None}
        self.momentum = Momentum(list(self._sizes.values()))
        self.update = DecayedUpdate([self._sizes[t.matrix] for t in self.homeward.received])
        self._alone = len(holdings[0]) == 1  # then matrices lie in the buffers whole and in order

    @property
    def oriented(self) -> tuple[int, int]:
        """(out, in)."""
        return self.shape[::-1] if self.transposed else self.shape

    def parts(self, storages: Sequence[Tensor]) -> list[Tensor]:
        """What this rank holds of each matrix, in order: views into the parameters' local `storages`."""
        return [self._part(storages, number) for number in self._sizes]

    def received(self, storages: Sequence[Tensor]) -> list[Tensor]:
        """The same parts in the order in which they come home."""
        return [self._part(storages, t.matrix) for t in self.homeward.received]

    def _part(self, storages: Sequence[Tensor], number: int) -> Tensor:
        matrix = self.matrices[number]
        return storages[matrix.parameter][matrix.index]

    def oriented_view(self, stack: Tensor) -> Tensor:
        """Matrices as stored, (N, *shape), seen as (N, out, in)."""
        return stack.mT if self.transposed else stack

    def room(self, buffer: Tensor) -> Tensor:
        """A flat buffer for `parts` on their way to `buffer`, which they may lie in at once if they go nowhere."""
        return buffer if self._alone else buffer.new_empty(sum(self._sizes.values()))

    def send_out(self, rounded: Tensor, buffer: Tensor) -> InFlight:
        """Put `parts`, one after another in `rounded`, on their way to the owners; they arrive in `buffer`."""
        if self._alone:
            return InFlight(buffer, None)
        part = dict(zip(self._sizes, rounded.split(list(self._sizes.values())), strict=True))
        return self.outward.start([part[t.matrix].view(t.region.size) for t in self.outward.sent], buffer)

    def stack(self, buffer: Tensor) -> Tensor:
        """A flat buffer of as many elements as the matrices of `mine` have, as the matrices, (N, *shape)."""
        return buffer.view(len(self.mine), *self.shape)

    def assemble(self, buffer: Tensor) -> Tensor:
        """The matrices of `mine` as stored, (N, *shape), from the buffer that brought their parts."""
        if self._alone:
            return self.stack(buffer)
        stack = self.stack(torch.empty_like(buffer))
        whole = dict(zip(self.mine, stack, strict=True))
        arrived = self.outward.received
        copy_all([t.region.of(whole[t.matrix]) for t in arrived], split(buffer, arrived))
        return stack

    def send_home(self, stack: Tensor) -> InFlight:
        """Put the matrices of `mine`, (N, *shape) and contiguous, on their way to those who hold parts of them."""
        if self._alone:
            return InFlight(stack.view(-1), None)
        whole = dict(zip(self.mine, stack, strict=True))
        parts = [t.region.of(whole[t.matrix]) for t in self.homeward.sent]
        return self.homeward.start(parts, stack.new_empty(self.homeward.arriving))


class OrthogonalOptimizer(RoleOptimizer):
    """Momentum, orthogonalised. A subclass says what each row of the orthogonal matrices is multiplied with."""

    roles: ClassVar[tuple[str, ...]] = ("matrix", "expert")

    def __init__(self, config: OrthogonalConfig, *, parameters: Sequence[OwnedParameter]):
        super().__init__(parameters)
        self.config = config
        self.momentum = self.zeros()
        self._dtype = getattr(torch, config.ns_dtype)
        self._wide = torch.promote_types(self._dtype, torch.float32)  # of norms
        self._device = self.momentum[0].device
        matrices = _matrices(self.parameters)
        self.buckets = _buckets(matrices, PLANS[config.distribution]([m.shape for m in matrices], base.ranks()))
        self.load: LoadReport = load_report(config.distribution, [m.shape for m in matrices], base.ranks())
        local = [base.local(m) for m in self.momentum]
        self.orthogonalising = Stopwatch(self._device)  # of the steps that are measured, waits for others left out
        self._momenta = [bucket.parts(local) for bucket in self.buckets]
        self._held: dict[int, Tensor] = {}  # by bucket, once recorded: where its momentum arrives and its update leaves
        self._replays: dict[int, Callable[[], None]] = {}

    @abstractmethod
    def row_factors(self, position: int, x_Nmn: Tensor, scale: float) -> Tensor:
        """What makes updates of the orthogonal matrices of this rank in bucket number `position`, `scale` included: a
        factor for each row, (N, m, 1), or for each matrix, (N, 1, 1), in fp32 or above."""

    @torch.no_grad()
    def step(self, lr: float, steps: int, measure: bool) -> Tensor | None:
        gradients, weights = self.gradients(), self.weights()
        squares = torch.zeros((), device=self._device)
        for bucket, update in self._updates(gradients, measure):
            if measure:
                norm = torch.linalg.vector_norm(update, dtype=self._wide)
                squares += norm.square() * (lr**2 / bucket.copies)
            bucket.update(bucket.received(weights), update, lr, self.config.weight_decay, self.config.cautious)
        return squares if measure else None

    def state_views(self) -> Iterator[StateView]:
        yield from self.sharded_views("momentum", self.momentum)

    @torch.no_grad()
    def record(self, capture: Capture) -> None:
        held = {i: self._buffer(i).zero_() for i, bucket in enumerate(self.buckets) if bucket.mine}
        # Row statistics are zero yet, and stay so where nothing but zeros is orthogonalised.
        replays = capture([partial(self._orthogonalise, i, buffer) for i, buffer in held.items()])
        self._held, self._replays = held, dict(zip(held, replays, strict=True))

    def _updates(self, gradients: list[Tensor], measure: bool) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with the flat buffer that brought its update home, two exchanges being under way at any time."""
        arriving = self._send(0, gradients)
        returning: tuple[Bucket, InFlight] | None = None
        for position, bucket in enumerate(self.buckets):
            arrived = arriving.wait()
            if position + 1 < len(self.buckets):
                arriving = self._send(position + 1, gradients)
            with self.orthogonalising.running(measure):
                self._replays.get(position, partial(self._orthogonalise, position, arrived))()
            if returning is not None:
                yield returning[0], returning[1].wait()
            returning = bucket, bucket.send_home(bucket.stack(arrived))
        yield returning[0], returning[1].wait()

    def _send(self, position: int, gradients: list[Tensor]) -> InFlight:
        bucket, buffer, c = self.buckets[position], self._buffer(position), self.config
        rounded = bucket.room(buffer)
        bucket.momentum(self._momenta[position], bucket.parts(gradients), rounded, c.momentum, c.nesterov)
        return bucket.send_out(rounded, buffer)

    def _buffer(self, position: int) -> Tensor:
        """Room for the matrices of this rank in a bucket; where they are recorded, always the same."""
        if position in self._held:
            return self._held[position]
        return torch.empty(self.buckets[position].outward.arriving, dtype=self._dtype, device=self._device)

    def _orthogonalise(self, position: int, buffer: Tensor) -> None:
        """From the parts of a bucket's matrices that arrived in `buffer` to the matrices' updates, whole, in it."""
        bucket = self.buckets[position]
        if not bucket.mine:
            return
        update = newton_schulz(bucket.assemble(buffer), self._dtype)
        factors = self.row_factors(position, bucket.oriented_view(update), self._scale(bucket.oriented))
        scale(update, bucket.oriented_view(factors), out_NRK=bucket.stack(buffer))

    def _scale(self, oriented: tuple[int, int]) -> float:
        fan_out, fan_in = oriented
        if self.config.scale == "spectral":
            return math.sqrt(max(1.0, fan_out / fan_in))
        return 0.2 * math.sqrt(max(fan_out, fan_in))


def _matrices(parameters: Sequence[OwnedParameter]) -> list[Matrix]:
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


def _buckets(matrices: list[Matrix], owners: Owners) -> list[Bucket]:
    """Matrices of a kind together, as many as the bound on a rank's share allows."""
    ranks, rank = base.ranks(), dist.get_rank() if dist.is_initialized() else 0
    by_rank: list[list[Region | None]] = [[m.region for m in matrices]]
    if ranks > 1:
        by_rank = [[] for _ in range(ranks)]
        dist.all_gather_object(by_rank, [m.region for m in matrices])
    kinds: dict[tuple, list[int]] = {}
    for number, matrix in enumerate(matrices):
        kinds.setdefault(matrix.kind, []).append(number)
    buckets = []
    # Costliest first: the device then has work while the host gets the many small ones ready.
    for (shape, *_), numbers in sorted(kinds.items(), key=lambda kind: -len(kind[1]) * cost(kind[0][0])):
        limit = max(1, BUCKET_ELEMENTS * ranks // math.prod(shape))
        for chosen in (numbers[i : i + limit] for i in range(0, len(numbers), limit)):
            holdings = [[held[i] for held in by_rank] for i in chosen]
            buckets.append(Bucket([matrices[i] for i in chosen], holdings, [owners[i] for i in chosen], rank))
    return buckets
