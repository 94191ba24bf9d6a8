"""Memory of a rank by kind, without a GPU: one micro-batch is run on tensors that have shapes but no storage.

Weights, gradients and optimizer state are counted from the parameters and the optimizers themselves. Activations are
not a formula: forward and backward run under PyTorch's FakeTensorMode, and a tensor's bytes count from its creation
until nothing refers to it. So every mode of activation checkpointing, and every new component, is measured as it is.

What is estimated is the peak of tensors that PyTorch allocates (`torch.cuda.max_memory_allocated`). Left out: the CUDA
context, fragmentation, NCCL's buffers, workspaces inside kernels, and what compilation fuses away.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.data.batch import Batch
from components.data.packing import cu_seqlens_length
from components.optimizers.roles import build_optimizers, parameters_by_role
from components.parallel.activation_checkpoint import apply_activation_checkpoint
from recipes.job import Job

MASTER_BYTES = 4  # weights and gradients are kept in fp32


@dataclass(frozen=True)
class Footprint:
    """What the model itself has: parameters by role and by sharding unit (one of them the root), bytes of state."""

    by_role: dict[str, int]
    by_unit: dict[str, int]
    optimizer_bytes: int
    buffer_bytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made while it is on, until they are gone. `peak` is the most at once. Views of what
    was there before count too, unless it is `ignored`."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in ignored)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = _grouped_mm(*args, **kwargs) if _only_bf16(function, args) else function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._enter(value.untyped_storage())
        return result

    def _enter(self, storage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, size: int) -> None:
        self.live -= size


def _only_bf16(function: Any, args: tuple) -> bool:
    """PyTorch's rule for the shape of a grouped product, which stands in for the product here, refuses fp32."""
    return function is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32


def _grouped_mm(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.ops.aten._grouped_mm.default(a.bfloat16(), b.bfloat16(), *rest, **options).float()


def footprint(job: Job) -> Footprint:
    """Parameters and state of the whole model, on one rank."""
    with FakeTensorMode():
        model = job.model.build()
        roles = {role: sum(o.parameter.numel() for o in owned) for role, owned in parameters_by_role(model).items()}
        units: Counter = Counter()
        for name, parameter in model.named_parameters():
            units[_unit(name)] += parameter.numel()
        with LiveBytes(ignored=[*model.parameters(), *model.buffers()]) as state:
            _alive = build_optimizers(model, {role: getattr(job.optimizer, role) for role in roles})
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return Footprint(roles, dict(units), state.live, buffers)


def memory_per_rank(job: Job, model: Footprint, ranks: int) -> dict[str, float]:
    """Bytes by kind on one of `ranks` ranks, and their total."""
    shards = ranks // job.parallelism.data_parallel_replicate_degree
    parameters = sum(model.by_unit.values())
    held, extra = activations(job)
    kinds = {
        "weights": MASTER_BYTES * parameters / shards,
        "gradients": MASTER_BYTES * parameters / shards,
        "optimizer": model.optimizer_bytes / shards,
        "gathered": _gathered(job, model),
        "activations": held,
        "backward": extra,
        "buffers": model.buffer_bytes,
    }
    return {**kinds, "total": sum(kinds.values())}


def _gathered(job: Job, model: Footprint) -> float:
    """Whole weights in compute dtype: the root's all the time; of the blocks two at once (the one that runs and the
    next, prefetched), or all of them if they stay after forward. Beside them one block's gradients on their way."""
    width = getattr(torch, job.training.dtype).itemsize
    reduced = getattr(torch, job.parallelism.reduce_dtype).itemsize
    blocks = sorted((n for unit, n in model.by_unit.items() if unit != "root"), reverse=True)
    present = blocks[:2] if job.parallelism.reshard_after_forward else blocks
    return width * (model.by_unit["root"] + sum(present)) + reduced * blocks[0]


def activations(job: Job) -> tuple[int, int]:
    """Bytes that one micro-batch holds between forward and backward, and what backward needs at most beyond them."""
    with FakeTensorMode():
        model = computing_model(job)
        batch = zeros_batch(job.training.local_batch_size, job.training.seq_len, job.data.packing)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_hand_over)
        with LiveBytes(ignored=[*model.parameters(), *model.buffers()]) as tracker:
            loss = model(batch).loss_sums.sum()
            held = tracker.live
            loss.backward()
    return held, tracker.peak - held


def computing_model(job: Job) -> nn.Module:
    """The model as a rank computes with it: weights in compute dtype but for the parts that stay in fp32."""
    model, dtype = job.model.build(), getattr(torch, job.training.dtype)
    exact = {p for m in model.modules() if getattr(m, "fp32_unit", False) for p in m.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in exact:
                module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
    section = job.activation_checkpoint
    apply_activation_checkpoint(model, section.mode, section.selective_ac_option, section.components)
    return model


def zeros_batch(rows: int, seq_len: int, packing: str) -> Batch:
    """A micro-batch of zeros. Documents cost a mask; how many there are makes no difference to memory."""
    tokens_BT1 = torch.zeros(rows, seq_len + 1, dtype=torch.int64)
    place = {"position_BT": tokens_BT1[:, :-1], "index": tokens_BT1[:, 0]}
    if packing == "window":
        return Batch(tokens_BT1=tokens_BT1, **place)
    starts = torch.zeros(cu_seqlens_length(rows, seq_len), dtype=torch.int32)
    return Batch(tokens_BT1=tokens_BT1, **place, document_BT1=tokens_BT1.int(), cu_seqlens=starts)


def _hand_over(parameter: nn.Parameter) -> None:
    """A gradient leaves as soon as it is complete, as it does when it is reduced to its owner."""
    parameter.grad = None


def _unit(name: str) -> str:
    """Which sharding unit a parameter belongs to (`components/parallel/fsdp2.py`)."""
    parts = name.split(".")
    if parts[0] in ("layers", "shared"):
        return ".".join(parts[:2])
    return ".".join(parts[:3]) if parts[:2] == ["mtp", "depths"] else "root"
