"""The update of weights with decay, operation by operation: what runs away from CUDA, and the yardstick of `op.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def decayed_update_reference(
    weights: Sequence[Tensor], update: Sequence[Tensor], lr: float, decay: float, cautious: bool
) -> None:
    """w <- w - lr (u + decay w), in place, the decay only where u w > 0 if `cautious`. `update`: the u of each weight,
    in its shape and any dtype; computed in the weights'."""
    parts = [u.to(w.dtype) for u, w in zip(update, weights, strict=True)]
    if decay:
        kept = [w * (w * u > 0) for w, u in zip(weights, parts, strict=True)] if cautious else weights
        parts = torch._foreach_add(parts, list(kept), alpha=decay)
    torch._foreach_add_(list(weights), parts, alpha=-lr)
