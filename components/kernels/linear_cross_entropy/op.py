"""Linear projection, softcap and cross-entropy over chunks of positions: the logits of a chunk exist once, briefly.

The gradients are formed in the forward pass, chunk by chunk, while the logits are at hand; backward only scales them.
Source of the scheme: Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2. Shapes: N positions, C of them a chunk,
D width, V vocabulary. With p = softmax(y), y = c·tanh(z/c), z = h Wᵀ: dz = (p − onehot)·(1 − (y/c)²).

An op of its own, so that compilers and recordings see one call; it never waits for the device. Left out on purpose:
heads that share one call and one dW, since each head's sum has its own upstream gradient, known in backward only.
"""

import torch
from torch import Tensor

from components.kernels.linear_cross_entropy import eager, launch


def linear_cross_entropy(h_ND: Tensor, weight_VD: Tensor, target_N: Tensor, softcap: float, chunk: int) -> Tensor:
    """Sum of −log softmax(c·tanh(h Wᵀ/c))[target] over targets that are not IGNORE; fp32 (fp64 for fp64), nats.

    target_N int64. `chunk` positions at a time. Differentiable once, in `h` and `weight`. On a GPU logits are rounded
    to the dtype of `h`, as are their gradients; sums are fp32. Equal bits in every run. Raises ValueError for shapes
    that do not fit.
    """
    _check(h_ND, weight_VD, target_N, chunk)
    train = torch.is_grad_enabled() and (h_ND.requires_grad or weight_VD.requires_grad)
    return torch.ops.hymo.linear_cross_entropy(h_ND, weight_VD, target_N, softcap, chunk, train)[0]


def _check(h: Tensor, weight: Tensor, target: Tensor, chunk: int) -> None:
    if h.ndim != 2 or weight.ndim != 2 or h.shape[1] != weight.shape[1] or target.shape != h.shape[:1] or not len(h):
        raise ValueError(
            "linear_cross_entropy needs h (N, D), weight (V, D) and target (N) with N at least 1, not "
            f"{tuple(h.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"linear_cross_entropy needs a chunk of at least 1 position, not {chunk}")


def _form(h: Tensor):
    """The Triton form on a GPU, else PyTorch's."""
    return launch if h.device.type == "cuda" and h.dtype != torch.float64 else eager


@torch.library.custom_op("hymo::linear_cross_entropy", mutates_args=())
def _forward(
    h: Tensor, weight: Tensor, target: Tensor, softcap: float, chunk: int, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum and, with `train`, its gradients dh in the dtype of h and dW in that of the sum (else empty)."""
    loss_and_gradient_, sum_dtype = _form(h).loss_and_gradient_, _sum_dtype(h)
    losses = torch.empty(len(h), dtype=sum_dtype, device=h.device)
    dh, dw = _empty_gradients(h, weight, train)
    logits = h.new_empty(min(chunk, len(h)), len(weight))
    for start in range(0, len(h), chunk):
        part = slice(start, start + chunk)
        z = torch.mm(h[part], weight.T, out=logits[: len(h[part])])
        losses[part], dz = loss_and_gradient_(z, target[part], softcap, train)
        if train:
            torch.mm(dz, weight, out=dh[part])
            _add_product_(dw, dz.T, h[part], first=start == 0)
    return losses.sum(), dh, dw


@_forward.register_fake
def _(h, weight, target, softcap, chunk, train):
    return h.new_empty((), dtype=_sum_dtype(h)), *_empty_gradients(h, weight, train)


def _sum_dtype(h: Tensor) -> torch.dtype:
    return torch.promote_types(h.dtype, torch.float32)


def _empty_gradients(h: Tensor, weight: Tensor, train: bool) -> tuple[Tensor, Tensor]:
    dh, dw = (h.shape, weight.shape) if train else ((0,), (0,))
    return h.new_empty(dh), weight.new_empty(dw, dtype=_sum_dtype(h))


def _add_product_(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or = for the first; products of 16-bit numbers are summed in the wider `total`."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


@torch.library.custom_op("hymo::linear_cross_entropy_backward", mutates_args=())
def _backward(grad: Tensor, dh: Tensor, dw: Tensor) -> tuple[Tensor, Tensor]:
    scaled = _form(dh).scaled
    return scaled(dh, grad, dh.dtype), scaled(dw, grad, dh.dtype)


@_backward.register_fake
def _(grad, dh, dw):
    return torch.empty_like(dh), torch.empty_like(dw, dtype=dh.dtype)


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # of dh and dW, which nobody differentiates
    ctx.save_for_backward(*output[1:])


def _gradients(ctx, grad: Tensor, *_):
    dh, dweight = torch.ops.hymo.linear_cross_entropy_backward(grad, *ctx.saved_tensors)
    return dh, dweight, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
