"""Activation checkpointing (Chen et al., arXiv 1604.06174): which parts run again in the backward pass.

Blocks and their parts have no side effects, so running one twice counts no expert twice.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from components.models.block import Block
from components.models.stacked_lm import BlockConfig, StackedLM


def apply_activation_checkpoint(
    model: StackedLM, mode: str, selective_ac_option: str, components: tuple[str, ...] = ("model",)
) -> None:
    """`components`: "model" (whole blocks), or labels of mixers and ffns. `mode` none; full, all of those; or
    selective: every n-th block's for an option "n", or for "op" all of those but with the results of matrix products,
    attention and the recurrence kept."""
    if mode == "none":
        return
    by_op = mode == "selective" and selective_ac_option == "op"
    every = int(selective_ac_option) if mode == "selective" and not by_op else 1
    for i, (block, labels) in enumerate(_labelled(model)):
        if i % every == 0:
            block.recompute = {part: _how(by_op) for part in _chosen(labels, components)}


def _labelled(model: StackedLM) -> Iterator[tuple[Block, BlockConfig]]:
    """Every physical layer with the labels of its parts."""
    labels = {step.layer: step.block for step in model.steps}
    return ((block, model.config.blocks[labels[i]]) for i, block in enumerate(model.layers))


def _chosen(labels: BlockConfig, components: tuple[str, ...]) -> tuple[str, ...]:
    """A block is recomputed as a whole, or its named parts are; a part within a whole one would run three times."""
    if "model" in components:
        return ("block",)
    return tuple(part for part in ("mixer", "ffn") if getattr(labels, part) in components)


def _how(by_op: bool) -> dict[str, Any]:
    """Options of `torch.utils.checkpoint`. Nothing in a block draws random numbers, and their state cannot be read
    while a CUDA graph is recorded."""
    if not by_op:
        return {"preserve_rng_state": False}
    # The hooks of a sharded unit inside a block mark themselves for the profiler, not equally often on recomputation.
    SAC_IGNORED_OPS.update(
        (
            torch.ops.profiler._record_function_enter_new.default,
            torch.ops.profiler._record_function_exit._RecordFunction,
        )
    )
    keep = partial(create_selective_checkpoint_contexts, _keep_products)
    return {"preserve_rng_state": False, "context_fn": keep}


def _kept_ops() -> set:
    aten = torch.ops.aten
    kept = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten._grouped_mm.default}
    for name in ("_flash_attention", "_efficient_attention", "_cudnn_attention", "_flash_attention_for_cpu"):
        op = getattr(aten, f"_scaled_dot_product{name}", None)
        kept |= {op.default} if op is not None else set()
    ours = torch.ops.hymo
    return kept | {ours.gated_delta_rule.default, ours.grouped_product.default, ours.router_product.default}


def _keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _kept_ops() else CheckpointPolicy.PREFER_RECOMPUTE
