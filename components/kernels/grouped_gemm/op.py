"""A mixture of SwiGLU experts by sorted dispatch and grouped matrix products, without host synchronisation.

Choices are sorted by expert (stable, so in batch order within an expert), each expert's rows then lie together and
one grouped product serves all experts. Rows go out and come back by a permutation and its inverse, so nothing is
accumulated atomically: results repeat bit for bit. Shapes: N tokens, K choices a token, E experts, D width, F hidden;
of one grouped product M rows (N·K), P and Q widths in and out.

Left out on purpose: capacity. A dropped choice is one of weight 0 (see `deepseek_moe`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from components.kernels.grouped_gemm import eager, launch
from components.kernels.swiglu.op import swiglu


def mixture_of_swiglu(
    x_ND: Tensor, w13_EDF: Tensor, w2_EFD: Tensor, expert_NK: Tensor, weight_NK: Tensor, counts_E: Tensor
) -> Tensor:
    """Σ_k weight · W2 (SiLU(W1 x) ⊙ W3 x) over each token's chosen experts, combined in fp32, in the dtype of `x`.

    expert_NK int64; weight_NK float; counts_E the number of choices of each expert, integer. Weights are stored (in,
    out), w1 and w3 side by side on the last axis.
    """
    choices = expert_NK.shape[1]
    order = expert_NK.flatten().to(torch.int16).argsort(stable=True)  # a radix sort takes a pass a byte
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    rows = _Permute.apply(x_ND.repeat_interleave(choices, 0), order, back)
    rows = grouped_mm(swiglu(grouped_mm(rows, w13_EDF, ends_E)), w2_EFD, ends_E)
    y_NKD = _Permute.apply(rows, back, order).unflatten(0, expert_NK.shape)
    return (y_NKD.to(weight_NK.dtype) * weight_NK[..., None]).sum(1).to(x_ND.dtype)


def grouped_mm(rows_MP: Tensor, weight_EPQ: Tensor, ends_E: Tensor) -> Tensor:
    """rows[ends[e−1]:ends[e]] @ weight[e] for every e, (M, Q), summed in fp32 at least. ends_E int32, its last value M.

    In bf16 PyTorch's own; its fp32 form waits for `ends` on the host, so other dtypes take ours. Differentiable once
    there. Products of fp32 numbers on CUDA are exact or TF32, as `torch.backends.cuda.matmul.allow_tf32` says.
    """
    if rows_MP.dtype == torch.bfloat16:
        return F.grouped_mm(rows_MP, weight_EPQ, offs=ends_E)
    return torch.ops.hymo.grouped_product(rows_MP, weight_EPQ, ends_E)


def _form(rows: Tensor):
    """The Triton form for fp32 on a GPU, else PyTorch's."""
    return launch if rows.is_cuda and rows.dtype == torch.float32 else eager


@torch.library.custom_op("hymo::grouped_product", mutates_args=())
def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _form(rows).product(rows, weight, ends)


@_product.register_fake
def _(rows, weight, ends):
    return rows.new_empty(len(rows), weight.shape[2])


@torch.library.custom_op("hymo::grouped_product_weight_gradient", mutates_args=())
def _weight_gradient(rows: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    return _form(rows).weight_gradient(rows, dy, ends)


@_weight_gradient.register_fake
def _(rows, dy, ends):
    return rows.new_empty(len(ends), rows.shape[1], dy.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, dy: Tensor):
    rows, weight, ends = ctx.saved_tensors
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    drows = torch.ops.hymo.grouped_product(dy, weight.mT, ends) if needs_rows else None
    dweight = torch.ops.hymo.grouped_product_weight_gradient(rows, dy, ends) if needs_weight else None
    return drows, dweight, None


_product.register_autograd(_gradients, setup_context=_setup_context)


class _Permute(torch.autograd.Function):
    """rows[order]; its gradient is a gather by the inverse, where autograd's own would scatter with atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (back,) = ctx.saved_tensors
        return grad[back], None, None
