"""Whole weights on every rank, sharded optimizer (ZeRO stage 1, Rajbhandari et al., arXiv 1910.02054).

What is trained are fp32 masters, sharded over all ranks as under `fsdp2`. The modules hold copies of them, whole, in
the compute dtype, at addresses that never change: gathered once a step after the update, in few large collectives. A
backward adds its gradients to fp32 sums, whole too, and the sums are reduced once a step. So a micro-batch touches no
other rank, whole micro-batches can be recorded as CUDA graphs, and accumulation costs no precision. The price is 2 + 4
bytes a parameter on every rank beside the shards, where `fsdp2` holds one block's weights, and between ranks room for
one bucket that is under way.

Left out on purpose: overlapping the one reduction with the last backward.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from components.kernels.accumulate.op import accumulate
from components.models.stacked_lm import StackedLM
from components.parallel.plan import Plan, compute_dtype, data_mesh, exact_parameters, placement
from registry import register

BUCKET = 64 * 2**20  # parameters that travel together: large messages, yet small buffers beside the whole

# Since torch 2.13 these have names under which they do not warn that they are deprecated.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Trained(NamedTuple):
    """A parameter in its three forms."""

    master: nn.Parameter  # fp32 DTensor: what optimizers and checkpoints see
    weight: nn.Parameter  # the whole in the compute dtype: what the modules hold
    gradient: Tensor  # fp32, whole: this rank's sum over micro-batches


@register("plan", "zero1")
@final
class Zero1(Plan):
    """Weights whole on each rank, optimizer state sharded; one gather and one reduction a step."""

    whole = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, parallelism, dtype: torch.dtype, device_type: str, world: int):
        self.mesh, self.dtype = data_mesh(device_type, world), dtype
        self.reduce_dtype = getattr(torch, parallelism.reduce_dtype)
        self.buckets: list[Bucket] = []

    @classmethod
    def obstacles(cls, parallelism) -> Iterator[tuple[str, str]]:
        if parallelism.expert_wrapping != "folded":
            yield "expert_wrapping", 'plan "zero1" has no units to wrap; set "folded", or plan = "fsdp2"'
        if parallelism.data_parallel_replicate_degree != 1:
            message = (
                'plan "zero1" shards over all ranks, its weights are whole on each anyway; set 1, or plan = "fsdp2"'
            )
            yield "data_parallel_replicate_degree", message

    def shard(self, model: StackedLM, ignored: Collection[nn.Parameter] = ()) -> None:
        masters = {p: self._master(p) for p in dict.fromkeys(model.parameters())}
        _replace(model, masters)

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        where = placement(parameter, self.mesh.size())
        size, offset = where.local_shard_size_and_offset(
            parameter.shape[where.dim], self.mesh.size(), self.mesh.get_local_rank()
        )
        local = parameter.detach().narrow(where.dim, min(offset, parameter.shape[where.dim]), size).contiguous()
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        stored = DTensor.from_local(local, self.mesh, [where], run_check=False, **shape)
        return nn.Parameter(stored, parameter.requires_grad)

    @torch.no_grad()
    def initialised(self, model: StackedLM) -> None:
        exact = exact_parameters(model)
        masters = list(dict.fromkeys(model.parameters()))
        weights = {m: _whole_weight(m, compute_dtype(m, exact, self.dtype)) for m in masters}
        _replace(model, weights)
        groups = [(group, dtype, self._reduced_in(dtype)) for dtype, group in _grouped(masters, weights)]
        parts = self.mesh.size() + 1 if self.mesh.size() > 1 else 0
        most = max(_length(group) * max(d.itemsize for d in dtypes) for group, *dtypes in groups)
        scratch = torch.empty(parts * most, dtype=torch.uint8, device=masters[0].device)
        self.buckets = [Bucket(group, weights, self.mesh, reduced, scratch) for group, _, reduced in groups]
        self.refresh_weights()

    def _reduced_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.float32 else self.reduce_dtype

    def clear_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.sums.zero_()

    def reduce_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.reduce()

    def refresh_weights(self) -> None:
        for bucket in self.buckets:
            bucket.gather()


@final
class Bucket:
    """Parameters of one compute dtype whose shards travel together, padded so that every rank's part is as long.

    Nothing here moves between steps, so views are made once: that takes the host longer than the exchange takes.
    """

    def __init__(
        self,
        masters: Sequence[nn.Parameter],
        weights: dict[nn.Parameter, nn.Parameter],
        mesh: DeviceMesh,
        reduce_dtype: torch.dtype,
        scratch: Tensor,
    ):
        """`scratch`: bytes for what is under way, which buckets share."""
        self.mesh, self.ranks = mesh, mesh.size()
        self.sums = torch.zeros(sum(m.numel() for m in masters), device=masters[0].device)
        parts = self.sums.split([m.numel() for m in masters])
        self.members = [Trained(m, weights[m], s.view(m.shape)) for m, s in zip(masters, parts, strict=True)]
        self._masters = [_local(m) for m in masters]
        self._weights = [self._pieces([m.weight.detach() for m in self.members], r) for r in range(self.ranks)]
        self._sums = [self._pieces([m.gradient for m in self.members], r) for r in range(self.ranks)]
        # A gradient once reduced takes the place of this rank's part of the sum, unless that part has gaps.
        mine = self._sums[mesh.get_local_rank()]
        self._reduced = [part if part.is_contiguous() else part.contiguous() for part in mine]
        self._gradients = [self._like(m, part) for m, part in zip(masters, self._reduced, strict=True)]
        if self.ranks > 1:
            self._gathering = UnderWay(scratch, self.members[0].weight.dtype, masters, mesh)
            self._reducing = UnderWay(scratch, reduce_dtype, masters, mesh)
        for member in (m for m in self.members if m.weight.requires_grad):
            member.weight.register_post_accumulate_grad_hook(_adding_to(member.gradient))

    @torch.no_grad()
    def gather(self) -> None:
        """Weights from masters."""
        if self.ranks == 1:
            torch._foreach_copy_(self._weights[0], self._masters)
            return
        travels = self._gathering
        torch._foreach_copy_(travels.mine, self._masters)
        all_gather(travels.all_parts, travels.my_part, group=self.mesh.get_group())
        for pieces, arrived in zip(self._weights, travels.by_rank, strict=True):
            torch._foreach_copy_(pieces, arrived)

    @torch.no_grad()
    def reduce(self) -> None:
        """Masters' gradients: the average over ranks of their sums."""
        if self.ranks > 1:
            travels = self._reducing
            for pieces, sent in zip(self._sums, travels.by_rank, strict=True):
                torch._foreach_copy_(sent, pieces)
            reduce_scatter(travels.my_part, travels.all_parts, group=self.mesh.get_group())
            torch._foreach_copy_(self._reduced, travels.mine)
            torch._foreach_div_(self._reduced, self.ranks)
        for member, gradient in zip(self.members, self._gradients, strict=True):
            member.master.grad = gradient

    def _pieces(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        """The rank's part of each whole tensor."""
        return [
            t.narrow(m.master.placements[0].dim, *_range(m.master, rank))
            for t, m in zip(tensors, self.members, strict=True)
        ]

    def _like(self, master: DTensor, local: Tensor) -> DTensor:
        shape = {"shape": master.shape, "stride": master.stride()}
        return DTensor.from_local(local, self.mesh, master.placements, run_check=False, **shape)


@final
class UnderWay:
    """What travels of a bucket in one dtype: every rank's part and beside them this rank's own, flat and in views of
    each parameter's part, padding left out."""

    def __init__(self, scratch: Tensor, dtype: torch.dtype, masters: Sequence[DTensor], mesh: DeviceMesh):
        ranks, length = mesh.size(), _length(masters)
        flat = scratch[: (ranks + 1) * length * dtype.itemsize].view(dtype).view(ranks + 1, length)
        self.all_parts, self.my_part = flat[:-1], flat[-1:]
        self.by_rank = [_views(part, masters, r) for r, part in enumerate(self.all_parts)]
        self.mine = _views(flat[-1], masters, mesh.get_local_rank())


def _length(masters: Sequence[DTensor]) -> int:
    """Elements of each rank's part of a bucket, with its padding."""
    return sum(_padded(m) for m in masters)


def _views(flat: Tensor, masters: Sequence[DTensor], rank: int) -> list[Tensor]:
    """The rank's part of each parameter within a flat buffer."""
    parts = flat.split([_padded(m) for m in masters])
    shapes = [_piece_shape(m, rank) for m in masters]
    return [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _adding_to(total: Tensor):
    """A hook that moves a parameter's new gradient into `total`, for autograd to find none there the next time."""

    def add(weight: nn.Parameter) -> None:
        accumulate(total, weight.grad)
        weight.grad = None

    return add


def _grouped(masters: Sequence[nn.Parameter], weights: dict) -> Iterator[tuple[torch.dtype, list[nn.Parameter]]]:
    """Buckets: parameters of one compute dtype, in order, about BUCKET together."""
    for dtype in dict.fromkeys(weights[m].dtype for m in masters):
        bucket: list[nn.Parameter] = []
        for master in (m for m in masters if weights[m].dtype == dtype):
            bucket.append(master)
            if sum(m.numel() for m in bucket) >= BUCKET:
                yield dtype, bucket
                bucket = []
        if bucket:
            yield dtype, bucket


def _whole_weight(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(master.shape, dtype=dtype, device=master.device), master.requires_grad)
    weight.master = master
    return weight


def _replace(model: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, new[parameter])


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local()


def _range(master: DTensor, rank: int) -> tuple[int, int]:
    """(start, length) of the rank's part on the sharded axis."""
    size, ranks = master.shape[master.placements[0].dim], master.device_mesh.size()
    chunk = -(-size // ranks)
    start = min(rank * chunk, size)
    return start, min(chunk, size - start)


def _piece_shape(master: DTensor, rank: int) -> torch.Size:
    axis = master.placements[0].dim
    return torch.Size([*master.shape[:axis], _range(master, rank)[1], *master.shape[axis + 1 :]])


def _padded(master: DTensor) -> int:
    """The longest rank's part."""
    return _piece_shape(master, 0).numel()
