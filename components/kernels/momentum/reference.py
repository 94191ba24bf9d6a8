"""Momentum, operation by operation: what runs away from CUDA, and the yardstick of `op.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def momentum_reference(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], rounded: Sequence[Tensor], kept: float, nesterov: bool
) -> None:
    """See `op.Momentum`, part by part; any dtypes."""
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - kept)
    ahead = torch._foreach_lerp(list(momenta), list(gradients), 1 - kept) if nesterov else list(momenta)
    torch._foreach_copy_(list(rounded), ahead)
