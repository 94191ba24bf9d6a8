"""The PyTorch form: the losses of a chunk's positions and the gradient before the softcap; a scaled gradient.

A chunk's logits are the largest tensor of a step, so everything is done to them in place. Shapes: C positions of the
chunk, V vocabulary.
"""

import torch
from torch import Tensor

from components.kernels.linear_cross_entropy.reference import IGNORE


def loss_and_gradient_(z_CV: Tensor, target_C: Tensor, softcap: float, train: bool) -> tuple[Tensor, Tensor]:
    """Losses (C,) in nats, fp32 (fp64 for fp64), and with `train` d(loss)/dz in the dtype of z; both are 0 where the
    target is IGNORE. `z` may be overwritten."""
    y_CV = _softcap_(z_CV.to(torch.promote_types(z_CV.dtype, torch.float32)), softcap)
    lse_C1 = y_CV.logsumexp(1, keepdim=True)
    chosen_C1 = y_CV.gather(1, target_C.clamp(min=0)[:, None])
    losses_C = (lse_C1 - chosen_C1)[:, 0] * (target_C != IGNORE)
    return losses_C, _gradient_(y_CV, lse_C1, target_C, softcap).to(z_CV.dtype) if train else z_CV


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor in `dtype`; `factor` is 0-d."""
    return (x * factor).to(dtype)


def _softcap_(z_CV: Tensor, softcap: float) -> Tensor:
    return z_CV.div_(softcap).tanh_().mul_(softcap) if softcap else z_CV


def _gradient_(y_CV: Tensor, lse_C1: Tensor, target_C: Tensor, softcap: float) -> Tensor:
    dy_CV = (y_CV - lse_C1).exp_()
    dy_CV.scatter_add_(1, target_C.clamp(min=0)[:, None], dy_CV.new_full((len(y_CV), 1), -1.0))
    dy_CV.mul_((target_C != IGNORE)[:, None])
    return dy_CV.mul_(y_CV.div_(softcap).square_().neg_().add_(1.0)) if softcap else dy_CV
