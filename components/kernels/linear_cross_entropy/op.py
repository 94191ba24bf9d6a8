"""Linear projection, softcap and cross-entropy over chunks of positions: the logits of a chunk exist once, briefly.

The gradient is formed in the forward pass, chunk by chunk, while the logits are at hand; backward only scales it.
Source of the scheme: Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2. Shapes: N positions, D width,
V vocabulary. With p = softmax(y), y = c·tanh(z/c), z = h Wᵀ: dz = (p − onehot)·(1 − (y/c)²).
"""

import torch
from torch import Tensor

from components.kernels.linear_cross_entropy.reference import IGNORE


def linear_cross_entropy(h_ND: Tensor, weight_VD: Tensor, target_N: Tensor, softcap: float, chunk: int) -> Tensor:
    """Sum of −log softmax(c·tanh(h Wᵀ/c))[target] over targets that are not IGNORE; fp32 (fp64 for fp64), nats.

    target_N int64. `chunk` positions at a time. Differentiable in `h` and `weight`.
    """
    return _LinearCrossEntropy.apply(h_ND, weight_VD, target_N, softcap, chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_ND: Tensor, weight_VD: Tensor, target_N: Tensor, softcap: float, chunk: int) -> Tensor:
        wide = torch.promote_types(h_ND.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=h_ND.device)
        train = any(ctx.needs_input_grad)
        dh_ND = torch.empty_like(h_ND) if train else None
        dw_VD = torch.zeros_like(weight_VD, dtype=wide) if train else None
        for start in range(0, len(h_ND), chunk):
            part = slice(start, start + chunk)
            y_CV = _softcap_((h_ND[part] @ weight_VD.T).to(wide), softcap)
            lse_C1 = y_CV.logsumexp(1, keepdim=True)
            loss += _loss_sum(y_CV, lse_C1, target_N[part])
            if train:
                dz_CV = _logit_gradient_(y_CV, lse_C1, target_N[part], softcap).to(h_ND.dtype)
                dh_ND[part] = dz_CV @ weight_VD
                dw_VD += dz_CV.T @ h_ND[part]
        if train:
            ctx.save_for_backward(dh_ND, dw_VD)
            ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        dh_ND, dw_VD = ctx.saved_tensors
        return (dh_ND * grad).to(dh_ND.dtype), (dw_VD * grad).to(ctx.weight_dtype), None, None, None


# A chunk's logits are the largest tensor of a step, so everything is done to them in place.


def _softcap_(z_CV: Tensor, softcap: float) -> Tensor:
    return z_CV.div_(softcap).tanh_().mul_(softcap) if softcap else z_CV


def _loss_sum(y_CV: Tensor, lse_C1: Tensor, target_C: Tensor) -> Tensor:
    chosen_C1 = y_CV.gather(1, target_C.clamp(min=0)[:, None])
    return ((lse_C1 - chosen_C1)[:, 0] * (target_C != IGNORE)).sum()


def _logit_gradient_(y_CV: Tensor, lse_C1: Tensor, target_C: Tensor, softcap: float) -> Tensor:
    """d(loss)/d(logits before the cap); `y` is overwritten."""
    dy_CV = (y_CV - lse_C1).exp_()
    dy_CV.scatter_add_(1, target_C.clamp(min=0)[:, None], dy_CV.new_full((len(y_CV), 1), -1.0))
    dy_CV.mul_((target_C != IGNORE)[:, None])
    return dy_CV.mul_(y_CV.div_(softcap).square_().neg_().add_(1.0)) if softcap else dy_CV
