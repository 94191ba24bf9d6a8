"""A model made ready for training on its ranks, in the one order that works (docs/parallelism.md says why):

build on meta -> how experts are stored, what stays whole -> activation checkpointing -> compile -> shard
-> allocate -> initialise -> record
"""

from dataclasses import dataclass

import torch

from components.kernels.gated_delta_rule.op import gated_delta_rule, use_fused
from components.kernels.grouped_gemm.op import grouped_mm
from components.models.stacked_lm import StackedLM
from components.parallel.activation_checkpoint import apply_activation_checkpoint
from components.parallel.compile import apply_compile
from components.parallel.cuda_graph import keep_whole, record, whole_mixers
from components.parallel.fsdp2 import exact_experts, separate_experts
from components.parallel.micro_batch import MicroBatch, sample_batch
from components.parallel.optional import attempt
from components.parallel.plan import Plan
from components.parameters import initialise
from registry import Component, lookup

MICRO_BATCH = "model"  # in [cuda_graph] components: the whole of it
OPTIMIZER = "optimizer"  # likewise: what an optimizer's `record` takes, under any plan


@dataclass(frozen=True)
class Prepared:
    """What the loop works with."""

    model: StackedLM
    plan: Plan
    micro_batch: MicroBatch  # forward and backward


def prepare_model(
    component: Component,
    *,
    parallelism,
    fused_gdn,
    moe_mixed_precision,
    activation_checkpoint,
    compile,
    cuda_graph,
    micro_batch: tuple[int, int],
    packing: str,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    world: int,
) -> Prepared:
    """The model that `component` describes, sharded over `world` ranks, on `device`, with initial values, for training
    on micro-batches of (rows, positions). Sections of the recipe come under their names. Raises ValueError for an
    optimisation that cannot be switched on and must be."""
    plan = lookup("plan", parallelism.plan).cls
    plan = plan(plan.Config(), parallelism=parallelism, dtype=dtype, device_type=device.type, world=world)
    use_fused(fused_gdn.enable and attempt("fused_gdn", fused_gdn.on_failure, lambda: _probe_fused(dtype, device)))
    with torch.device("meta"):
        model = component.build()
        _arrange(model, parallelism, moe_mixed_precision, cuda_graph, dtype, device)
    ac = activation_checkpoint
    apply_activation_checkpoint(model, ac.mode, ac.selective_ac_option, ac.components)
    if compile.enable:
        apply_compile(model, compile.components, compile.backend, compile.on_failure)
    plan.shard(model, ignored=[parameter for mixer in whole_mixers(model) for parameter in mixer.parameters()])
    model.to_empty(device=device)
    initialise(model, seed)
    model.reset_buffers()
    plan.initialised(model)
    prepared = Prepared(model, plan, MicroBatch(model))
    if parts := recorded_parts(cuda_graph):
        attempt("cuda_graph", cuda_graph.on_failure, lambda: _record(prepared, parts, micro_batch, packing, device))
        for mixer in whole_mixers(model):
            mixer.average_gradients()
    return prepared


def recorded_parts(cuda_graph) -> tuple[str, ...]:
    """What of the model is recorded: "model", or labels of mixers."""
    return tuple(part for part in cuda_graph.components if part != OPTIMIZER) if cuda_graph.enable else ()


def _record(prepared: Prepared, parts: tuple[str, ...], micro_batch: tuple[int, int], packing: str, device) -> None:
    if MICRO_BATCH in parts:
        sample = sample_batch(*micro_batch, prepared.model.config.vocab_size, packing, device)
        prepared.micro_batch.record(sample)
    else:
        record(prepared.model, micro_batch)


def _arrange(model: StackedLM, parallelism, moe_mixed_precision, cuda_graph, dtype: torch.dtype, device) -> None:
    """Where weights will lie and in what they compute; the model has no values yet."""
    if parallelism.expert_wrapping == "per_expert":
        separate_experts(model)
    on_failure = moe_mixed_precision.on_failure
    if not (
        moe_mixed_precision.enable and attempt("moe_mixed_precision", on_failure, lambda: _probe_grouped(dtype, device))
    ):
        exact_experts(model)
    if MICRO_BATCH not in (parts := recorded_parts(cuda_graph)):
        keep_whole(model, parts, dtype)


def _probe_fused(dtype: torch.dtype, device: torch.device) -> None:
    """The recurrence and its gradients on 16 tokens of one head, or what the device or its compiler has to say."""
    shapes = [(1, 16, 1, 32)] * 3 + [(1, 16, 1)] * 2
    inputs = [torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
    gates = torch.zeros(2, 1, device=device)
    gated_delta_rule(*inputs, *gates)[0].square().sum().backward()


def _probe_grouped(dtype: torch.dtype, device: torch.device) -> None:
    """A grouped product and its gradients in `dtype`, or what the device has to say against it."""
    rows, weight = (torch.ones(s, dtype=dtype, device=device, requires_grad=True) for s in ((16, 16), (2, 16, 16)))
    grouped_mm(rows, weight, torch.tensor([8, 16], dtype=torch.int32, device=device)).square().sum().backward()
