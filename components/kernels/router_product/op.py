"""A router's logits, to fp32 from hidden states in whatever dtype.

cuBLAS would need an fp32 copy of the hidden states, twice their bytes and kept for backward: for 16,384 tokens of 896
and 16 experts on an H200 88 us forward and 157 back with the copies, where this takes 15 and 43. From bf16 states the
logits err by 3e-6, relative, where fp32 products err by 4e-7 and TF32, which a recipe may allow elsewhere and which
never enters here, by 2e-4. Shapes: N tokens, D width, E experts.
"""

import torch
import triton
from torch import Tensor

from components.kernels.router_product import kernels, reference

EXPERTS = 64  # a tile's most
SHARE = 512  # tokens summed by one program of the weight's gradient
PRODUCT, INPUT, WEIGHT = (64, 128), (64, 64), (64, 128)  # tiles: tokens, columns


def router_product(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """x Wᵀ, fp32 (N, E). `x` in any dtype up to fp32, the weight fp32; the gradient of `x` is in its own dtype."""
    return torch.ops.hymo.router_product(x_ND, weight_ED)


def launch_product(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """The Triton form."""
    (N, D), E, (rows, columns) = x_ND.shape, len(weight_ED), PRODUCT
    y_NE = weight_ED.new_empty(N, E)
    grid = triton.cdiv(N, rows), triton.cdiv(E, _experts(E))
    kernels.router_product[grid](
        x_ND.contiguous(), weight_ED.contiguous(), y_NE, N, D, E, BN=rows, BD=columns, BE=_experts(E)
    )
    return y_NE


def launch_input_gradient(dy_NE: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
    """The Triton form."""
    (N, E), D, (rows, columns) = dy_NE.shape, weight_ED.shape[1], INPUT
    dx_ND = dy_NE.new_empty(N, D, dtype=dtype)
    grid = triton.cdiv(N, rows), triton.cdiv(D, columns)
    kernels.router_input_gradient[grid](
        dy_NE.contiguous(), weight_ED.contiguous(), dx_ND, N, D, E, BN=rows, BD=columns, BE=_experts(E)
    )
    return dx_ND


def launch_weight_gradient(dy_NE: Tensor, x_ND: Tensor) -> Tensor:
    """The Triton form. Shares of the tokens are summed apart, then together in a fixed order."""
    (N, D), E, (rows, columns) = x_ND.shape, dy_NE.shape[1], WEIGHT
    shares = dy_NE.new_empty(triton.cdiv(N, SHARE), E, D)
    grid = len(shares), triton.cdiv(D, columns), triton.cdiv(E, _experts(E))
    kernels.router_weight_gradient[grid](
        dy_NE.contiguous(), x_ND.contiguous(), shares, N, D, E, SHARE, BN=rows, BD=columns, BE=_experts(E)
    )
    return shares.sum(0)


def _experts(experts: int) -> int:
    """A tile's; products want sixteen at least."""
    return min(max(16, triton.next_power_of_2(experts)), EXPERTS)


@torch.library.custom_op("hymo::router_product", mutates_args=())
def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (launch_product if x.is_cuda else reference.product)(x, weight)


@_product.register_fake
def _(x, weight):
    return weight.new_empty(len(x), len(weight))


@torch.library.custom_op("hymo::router_product_backward", mutates_args=())
def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return launch_input_gradient(dy, weight, x.dtype), launch_weight_gradient(dy, x)
    return reference.input_gradient(dy, weight, x.dtype), reference.weight_gradient(dy, x)


@_backward.register_fake
def _(dy, x, weight):
    return x.new_empty(x.shape), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, dy: Tensor):
    return torch.ops.hymo.router_product_backward(dy, *ctx.saved_tensors)


_product.register_autograd(_gradients, setup_context=_setup_context)
