"""Memory of a rank by kind, without a GPU: one micro-batch is run on tensors that have shapes but no storage.

Weights, gradients and optimizer state are counted from the parameters and the optimizers themselves. Activations are
not a formula: forward and backward run under PyTorch's FakeTensorMode, and a tensor's bytes count from its creation
until nothing refers to it. So every mode of activation checkpointing, and every new component, is measured as it is.
A compiled part keeps what the compiler's own partition of forward and backward says. The tensors say that they lie on a
CPU, since autograd takes CUDA's only where there is a GPU; what CUDA does otherwise is put in its place
(`norms_of_cuda`, `_run`).

Two sums: what the GPU must hold (`total`), and the most that `torch.cuda.max_memory_allocated` counts (`allocated`).
They differ where a micro-batch is recorded: it is recorded before there is optimizer state, and keeps all of its memory
from then on, which PyTorch has reserved but no longer counts as allocated. Left out: the CUDA context, fragmentation,
NCCL's buffers, between ranks `zero1`'s room for a bucket and what NorMuon holds of other ranks' matrices, workspaces
inside kernels and what an update makes on its way (a gigabyte in HyMo's primary, kept where it is recorded).
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from components.data.batch import Batch
from components.data.packing import cu_seqlens_length
from components.kernels.gated_delta_rule.op import use_fused
from components.optimizers.roles import build_optimizers, parameters_by_role
from components.parallel.activation_checkpoint import apply_activation_checkpoint
from components.parallel.apply import MICRO_BATCH, recorded_parts
from components.parallel.compile import apply_compile
from components.parallel.fsdp2 import exact_experts, separate_experts
from components.parallel.plan import compute_dtype, exact_parameters
from components.parameters import logical_path
from recipes.job import Job
from registry import lookup

MASTER_BYTES = 4  # weights and gradients are kept in fp32
ROOT = "root"  # the sharding unit of what is in no block


@dataclass(frozen=True)
class Footprint:
    """What the model itself has: parameters by role, bytes of its weights in compute dtype by FSDP unit (one of them
    the root), bytes of state."""

    by_role: dict[str, int]
    computing: dict[str, int]
    optimizer_bytes: int
    buffer_bytes: int

    @property
    def parameters(self) -> int:
        return sum(self.by_role.values())


class Peak(NamedTuple):
    """Bytes at the moment when their sum is largest."""

    tensors: int
    gradients: float


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made while it is on, until they are gone, and of `gradients`, which others count.
    `peak` is the most at once. Views of what was there before count too, unless it is `ignored`."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live, self.gradients = 0, 0.0
        self.peak = Peak(0, 0.0)
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in ignored)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs compiled below it, and only there counts what it keeps."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = _run(function, args, kwargs or {})
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._enter(value.untyped_storage())
        return result

    def _enter(self, storage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.live += storage.nbytes()
            self.passing(0)
            weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, size: int) -> None:
        self.live -= size

    def passing(self, size: int) -> None:
        """A tensor of `size` bytes that is gone at once."""
        self.peak = max(self.peak, Peak(self.live + size, self.gradients), key=sum)


@contextmanager
def norms_of_cuda() -> Iterator[None]:
    """CUDA has RMSNorm in one kernel, a CPU in several: of what these keep, only the input and a number a row stay. A
    compiler takes it apart on either; from the stand-in's gradients, which depend on nothing, it would conclude that
    nothing need be kept for them."""
    plain = F.rms_norm

    def norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return plain(x, shape, weight, eps) if torch.compiler.is_compiling() else _RmsNorm.apply(x, shape, weight)

    F.rms_norm = norm
    try:
        yield
    finally:
        F.rms_norm = plain


class _RmsNorm(torch.autograd.Function):
    """The shapes of CUDA's `_fused_rms_norm` and of its gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: -len(shape)], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _run(function: Any, args: tuple, kwargs: dict) -> Any:
    """The function, or what stands in for it."""
    if function.namespace != "hymo":
        return function(*args, **kwargs)
    # What an op of ours keeps for backward depends on the device: its rule for shapes is asked about CUDA tensors.
    args, kwargs = tree_map_only(Tensor, lambda x: _like(x, "cuda"), (args, kwargs))
    return tree_map_only(Tensor, lambda x: _like(x, "cpu"), function(*args, **kwargs))


def _like(x: Tensor, device: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def footprint(job: Job) -> Footprint:
    """Parameters and state of the whole model, on one rank."""
    with FakeTensorMode():
        model = _arranged(job)
        roles = {role: sum(o.parameter.numel() for o in owned) for role, owned in parameters_by_role(model).items()}
        with LiveBytes(ignored=[*model.parameters(), *model.buffers()]) as state:
            _alive = build_optimizers(model, {role: getattr(job.optimizer, role) for role in roles})
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        computing: Counter = Counter()
        for name, dtype in _compute_dtypes(job, model).items():
            computing[_unit(name)] += model.get_parameter(name).numel() * dtype.itemsize
    return Footprint(roles, dict(computing), state.live, buffers)


def _arranged(job: Job) -> nn.Module:
    """The model with its experts as the recipe stores them and computes with them."""
    model = job.model.build()
    if job.parallelism.expert_wrapping == "per_expert":
        separate_experts(model)
    if not job.moe_mixed_precision.enable:
        exact_experts(model)
    return model


def _compute_dtypes(job: Job, model: nn.Module) -> dict[str, torch.dtype]:
    """In what each parameter is computed with, by name."""
    exact, dtype = exact_parameters(model), getattr(torch, job.training.dtype)
    return {name: compute_dtype(parameter, exact, dtype) for name, parameter in model.named_parameters()}


def memory_per_rank(job: Job, model: Footprint, ranks: int) -> dict[str, float]:
    """Bytes by kind that one of `ranks` ranks must hold, their total, and the most that PyTorch counts as allocated."""
    shards = ranks // job.parallelism.data_parallel_replicate_degree
    step = activations(job, ranks)
    kinds = {
        "weights": MASTER_BYTES * model.parameters / shards,
        "optimizer": model.optimizer_bytes / shards,
        "gathered": _gathered(job, model),
        "gradients": step.peak.gradients,
        "activations": step.held,
        "backward": step.peak.tensors - step.held,
        "buffers": model.buffer_bytes,
    }
    total = sum(kinds.values())
    moments = [total]
    if _records_micro_batch(job):  # while it is recorded, and afterwards
        moments = [total - kinds["optimizer"], total - kinds["activations"] - kinds["backward"]]
    return {**kinds, "total": total, "allocated": max(moments)}


def _records_micro_batch(job: Job) -> bool:
    return MICRO_BATCH in recorded_parts(job.cuda_graph)


def _keeps_whole(job: Job) -> bool:
    """Whether the plan keeps whole weights and whole sums of gradients on every rank (`zero1`)."""
    return lookup("plan", job.parallelism.plan).cls.whole


def _gathered(job: Job, model: Footprint) -> int:
    """Whole weights in compute dtype: all of them where the plan keeps them or they stay after forward; else the root's
    and of the blocks two at once, the one that runs and the next, prefetched."""
    blocks = sorted((size for unit, size in model.computing.items() if unit != ROOT), reverse=True)
    stay = _keeps_whole(job) or not job.parallelism.reshard_after_forward
    return model.computing[ROOT] + sum(blocks if stay else blocks[:2])


@dataclass(frozen=True)
class StepBytes:
    """What one micro-batch holds between forward and backward, and the most while it runs."""

    held: int
    peak: Peak


def activations(job: Job, ranks: int = 1) -> StepBytes:
    """Forward and backward of the micro-batch that needs most: one with the gradients of earlier ones beside it, or the
    only one, in which each appears as backward gets to it."""
    training = job.training
    with FakeTensorMode(), norms_of_cuda(), _recurrence(job):
        model = computing_model(job)
        batch = zeros_batch(training.local_batch_size, training.seq_len, job.data.packing)
        if job.compile.enable:
            _compile(job, model, batch)
        tracker = LiveBytes([*model.parameters(), *model.buffers()])
        _count_gradients(job, model, tracker, ranks)
        with tracker:
            loss = model(batch).loss_sums.sum()
            held = tracker.live
            loss.backward()
    return StepBytes(held, tracker.peak)


@contextmanager
def _recurrence(job: Job) -> Iterator[None]:
    """The form that the recipe chooses decides what the recurrence keeps."""
    use_fused(job.fused_gdn.enable)
    try:
        yield
    finally:
        use_fused(True)


def _compile(job: Job, model: nn.Module, batch: Batch) -> None:
    """Trace and partition as the run will, without generating code; what the compiler cannot take stays eager."""
    torch._dynamo.reset()
    apply_compile(model, job.compile.components, "aot_eager_decomp_partition", on_failure="plain")
    model(batch).loss_sums.sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def _count_gradients(job: Job, model: nn.Module, tracker: LiveBytes, ranks: int) -> None:
    """Let `tracker` know of the gradients that a rank keeps, and let autograd's own go as the plan does."""
    training, parameters = job.training, sum(p.numel() for p in model.parameters())
    if _keeps_whole(job):
        tracker.gradients = MASTER_BYTES * parameters
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        return
    kept = MASTER_BYTES / (ranks // job.parallelism.data_parallel_replicate_degree)
    only = training.global_batch_size == training.local_batch_size * ranks
    tracker.gradients = 0 if only else kept * parameters
    _reduce_by_unit(model, tracker, getattr(torch, job.parallelism.reduce_dtype).itemsize, kept if only else 0)


def _reduce_by_unit(model: nn.Module, tracker: LiveBytes, width: int, kept: float) -> None:
    """As `fsdp2`: a unit's gradients lie whole until all are there, then in one buffer of `width` bytes a value, then
    as a shard of `kept` bytes for each value of the whole, 0 if it joins an earlier one."""
    names = {p: _unit(logical_path(name)) for name, p in model.named_parameters()}
    missing, arrived = Counter(names.values()), defaultdict(list)

    def arrive(parameter: nn.Parameter) -> None:
        unit = names[parameter]
        arrived[unit].append(parameter.grad)
        parameter.grad = None
        missing[unit] -= 1
        if not missing[unit]:
            elements = sum(gradient.numel() for gradient in arrived.pop(unit))
            tracker.passing(width * elements)
            tracker.gradients += kept * elements

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(arrive)


def computing_model(job: Job) -> nn.Module:
    """The model as a rank computes with it: weights in compute dtype but for the parts that stay in fp32."""
    model = _arranged(job)
    for name, dtype in _compute_dtypes(job, model).items():
        owner, _, last = name.rpartition(".")
        shape = model.get_parameter(name).shape
        setattr(model.get_submodule(owner), last, nn.Parameter(torch.empty(shape, dtype=dtype)))
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


def _unit(name: str) -> str:
    """Which sharding unit a parameter belongs to (`components/parallel/fsdp2.py`)."""
    parts = name.split(".")
    if parts[0] in ("layers", "shared"):
        return ".".join(parts[:2])
    return ".".join(parts[:3]) if parts[:2] == ["mtp", "depths"] else ROOT
