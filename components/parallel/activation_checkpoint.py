"""Activation checkpointing (Chen et al., arXiv 1604.06174): which blocks run again in the backward pass.

Blocks have no side effects, so running one twice counts no expert twice.
"""

from functools import partial

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from components.models.stacked_lm import StackedLM


def apply_activation_checkpoint(model: StackedLM, mode: str, selective_ac_option: str) -> None:
    """`mode` none, full (every block) or selective: every n-th block for an option "n", or for "op" every block,
    keeping the results of matrix products, attention and the recurrence."""
    if mode == "none":
        return
    by_op = mode == "selective" and selective_ac_option == "op"
    every = int(selective_ac_option) if mode == "selective" and not by_op else 1
    # The hooks of a sharded unit inside a block mark themselves for the profiler, not equally often on recomputation.
    SAC_IGNORED_OPS.update(
        (
            torch.ops.profiler._record_function_enter_new.default,
            torch.ops.profiler._record_function_exit._RecordFunction,
        )
    )
    how = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)} if by_op else {}
    for i, block in enumerate(model.layers):
        if i % every == 0:
            block.recompute = how


def _kept_ops() -> set:
    aten = torch.ops.aten
    kept = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten._grouped_mm.default}
    for name in ("_flash_attention", "_efficient_attention", "_cudnn_attention", "_flash_attention_for_cpu"):
        op = getattr(aten, f"_scaled_dot_product{name}", None)
        kept |= {op.default} if op is not None else set()
    return kept | {torch.ops.hymo.gated_delta_rule.default}


def _keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _kept_ops() else CheckpointPolicy.PREFER_RECOMPUTE
