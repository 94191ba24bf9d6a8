"""The Triton form, host side."""

import torch
import triton
from torch import Tensor

from components.kernels.linear_cross_entropy import kernels
from components.kernels.linear_cross_entropy.reference import IGNORE

BLOCK, WARPS = 8192, 32  # of a row at a time: few rows in flight, so that a second reading finds them in the cache
LARGEST_BOUND = 40.0  # exp(−2c) must not underflow where the softcap c stands for the maximum


def loss_and_gradient_(z_CV: Tensor, target_C: Tensor, softcap: float, train: bool) -> tuple[Tensor, Tensor]:
    """As in `eager.py`; the gradient takes the logits' place."""
    losses_C = torch.empty(len(z_CV), dtype=torch.float32, device=z_CV.device)
    kernels.loss_and_gradient[(len(z_CV),)](
        z_CV,
        target_C,
        losses_C,
        z_CV.shape[1],
        softcap,
        IGNORE=IGNORE,
        CAPPED=softcap > 0,
        BOUNDED=0 < softcap <= LARGEST_BOUND,
        APPROXIMATE=z_CV.dtype != torch.float32,  # a third faster, and rounding logits to 16 bits costs far more
        GRADIENT=train,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return losses_C, z_CV


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """In one pass, where PyTorch takes two or a slow one."""
    y, block = torch.empty_like(x, dtype=dtype), 4096
    kernels.scale[(triton.cdiv(x.numel(), block),)](x, factor, y, x.numel(), BLOCK=block, num_warps=8)
    return y
