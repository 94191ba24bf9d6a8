"""A model made ready for training on its ranks, in the one order that works:

    build on meta -> activation checkpointing -> compile -> shard -> allocate -> initialise

Checkpointing changes what a block's call does, so the compiler must see it; compiled calls must lie inside the
sharding hooks, which cannot be compiled; and values are drawn last, because only then is it known which part of each
logical tensor this rank holds.
"""

import torch

from components.models.stacked_lm import StackedLM
from components.parallel.activation_checkpoint import apply_activation_checkpoint
from components.parallel.compile import apply_compile
from components.parallel.fsdp2 import apply_fsdp2, data_mesh
from components.parameters import initialise
from registry import Component


def prepare_model(
    component: Component,
    *,
    parallelism,
    activation_checkpoint,
    compile,
    dtype: torch.dtype,
    seed: int,
    device,
    world: int,
) -> StackedLM:
    """The model that `component` describes, sharded over `world` ranks, on `device`, with initial values. The middle
    arguments are the recipe's sections of those names."""
    with torch.device("meta"):
        model = component.build()
    apply_activation_checkpoint(model, activation_checkpoint.mode, activation_checkpoint.selective_ac_option)
    if compile.enable:
        apply_compile(model, compile.components, compile.on_failure)
    mesh = data_mesh(
        device.type, world, parallelism.data_parallel_shard_degree, parallelism.data_parallel_replicate_degree
    )
    reduce_dtype = getattr(torch, parallelism.reduce_dtype)
    apply_fsdp2(model, mesh, dtype, reduce_dtype, parallelism.reshard_after_forward)
    model.to_empty(device=device)
    initialise(model, seed)
    model.reset_buffers()
    return model
