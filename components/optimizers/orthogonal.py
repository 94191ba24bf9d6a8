"""Optimizers that orthogonalise whole matrices: the machinery that Muon and NorMuon share.

N matrices of one shape, m output neurons, n inputs. A step, for every logical matrix of the role:

    momentum on the local shard -> whole matrix to its owner -> Newton-Schulz -> (NorMuon: rows) -> scale -> back to
    the shards -> weight decay and update

Matrices of one shape and layout form a batch: one batched Newton-Schulz. Batches form buckets: one launch for the
momenta, one exchange each way, one launch for the weights. While a bucket is computed, the next one's momentum and the
last one's update are under way. On one rank nothing moves, but what would travel is rounded as if it did, so that any
number of ranks computes the same.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from components.kernels.newton_schulz.op import newton_schulz, scale
from components.optimizers import base
from components.optimizers.base import Capture, RoleOptimizer, StateView
from components.optimizers.bucket import Batch, Bucket, buckets_of, matrices_of
from components.optimizers.distribution import PLANS, LoadReport, load_report
from components.optimizers.exchange import wait
from components.optimizers.stopwatch import Stopwatch
from components.parameters import OwnedParameter


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
        matrices = matrices_of(self.parameters)
        owners = PLANS[config.distribution]([m.shape for m in matrices], base.ranks())
        self.buckets = buckets_of(matrices, owners, torch.empty(0, dtype=self._dtype, device=self._device))
        self.load: LoadReport = load_report(config.distribution, [m.shape for m in matrices], base.ranks())
        self.orthogonalising = Stopwatch(self._device)  # of the steps that are measured, waits for others left out
        self._momenta = [base.local(m) for m in self.momentum]
        self._orthogonalise = [partial(self._orthogonalised, bucket) for bucket in self.buckets]

    @property
    def batches(self) -> list[Batch]:
        """Of all buckets, those this rank has matrices in."""
        return [batch for bucket in self.buckets for batch in bucket.batches]

    @abstractmethod
    def row_factors(self, batch: Batch, x_Nmn: Tensor, scale: float) -> Tensor:
        """What makes updates of the orthogonal matrices of this rank in `batch`, `scale` included: a factor for each
        row, (N, m, 1), or for each matrix, (N, 1, 1), in fp32 or above."""

    @torch.no_grad()
    def step(self, lr: float, steps: int, measure: bool) -> Tensor | None:
        gradients, weights, c = self.gradients(), self.weights(), self.config
        squares = torch.zeros((), device=self._device)
        for bucket in self._updated(gradients, measure):
            if measure:
                norm = torch.linalg.vector_norm(bucket.update, dtype=self._wide)
                squares += norm.square() * (lr**2 / bucket.copies)
            bucket.apply(weights, lr, c.weight_decay, c.cautious)
        return squares if measure else None

    def state_views(self) -> Iterator[StateView]:
        yield from self.sharded_views("momentum", self.momentum)

    @torch.no_grad()
    def record(self, capture: Capture) -> None:
        for bucket in self.buckets:
            bucket.owned.zero_()
        # Row statistics are zero yet, and stay so where nothing but zeros is orthogonalised.
        mine = [i for i, bucket in enumerate(self.buckets) if bucket.batches]
        replays = capture([self._orthogonalise[i] for i in mine])
        for i, replay in zip(mine, replays, strict=True):
            self._orthogonalise[i] = replay

    def _updated(self, gradients: list[Tensor], measure: bool) -> Iterator[Bucket]:
        """Each bucket once its update came home. While one is computed, the next goes out and the last comes home."""
        leaving = self._send(self.buckets[0], gradients)
        previous: tuple[Bucket, dist.Work | None] | None = None
        for bucket, following, compute in zip_longest(self.buckets, self.buckets[1:], self._orthogonalise):
            wait(leaving)
            if following is not None:
                leaving = self._send(following, gradients)
            with self.orthogonalising.running(measure):
                compute()
            returning = bucket.send_home()
            if previous is not None:
                wait(previous[1])
                yield previous[0]
            previous = bucket, returning
        wait(previous[1])
        yield previous[0]

    def _send(self, bucket: Bucket, gradients: list[Tensor]) -> dist.Work | None:
        return bucket.send_out(self._momenta, gradients, self.config.momentum, self.config.nesterov)

    def _orthogonalised(self, bucket: Bucket) -> None:
        """From the parts of a bucket's matrices that arrived to those of the matrices' updates, where they were."""
        stacks = bucket.stacks()  # of all batches, before the first update goes where another's parts arrived
        for batch, stack in zip(bucket.batches, stacks, strict=True):
            update = newton_schulz(stack, self._dtype)
            factors = self.row_factors(batch, batch.oriented_view(update), self._scale(batch.oriented))
            scale(update, batch.oriented_view(factors), out_NRK=stack)
        bucket.put_back(stacks)

    def _scale(self, oriented: tuple[int, int]) -> float:
        fan_out, fan_in = oriented
        if self.config.scale == "spectral":
            return math.sqrt(max(1.0, fan_out / fan_in))
        return 0.2 * math.sqrt(max(fan_out, fan_in))
