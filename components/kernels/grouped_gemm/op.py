"""A mixture of SwiGLU experts by sorted dispatch and grouped matrix products, without host synchronisation.

Choices are sorted by expert (stable, so in batch order within an expert), each expert's rows then lie together and
one grouped product serves all experts. Rows go out and come back by a permutation and its inverse, so nothing is
accumulated atomically: results repeat bit for bit. Shapes: N tokens, K choices a token, E experts, D width, F hidden.

Left out on purpose: capacity. A dropped choice is one of weight 0 (see `deepseek_moe`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from components.kernels.swiglu.op import swiglu


def mixture_of_swiglu(
    x_ND: Tensor, w13_EDF: Tensor, w2_EFD: Tensor, expert_NK: Tensor, weight_NK: Tensor, counts_E: Tensor
) -> Tensor:
    """Σ_k weight · W2 (SiLU(W1 x) ⊙ W3 x) over each token's chosen experts, combined in fp32, in the dtype of `x`.

    expert_NK int64; weight_NK float; counts_E the number of choices of each expert, integer. Weights are stored (in,
    out), w1 and w3 side by side on the last axis.
    """
    choices = expert_NK.shape[1]
    order = expert_NK.flatten().argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    rows = _Permute.apply(x_ND.repeat_interleave(choices, 0), order, back)
    rows = grouped_mm(swiglu(grouped_mm(rows, w13_EDF, ends_E)), w2_EFD, ends_E)
    y_NKD = _Permute.apply(rows, back, order).unflatten(0, expert_NK.shape)
    return (y_NKD.to(weight_NK.dtype) * weight_NK[..., None]).sum(1).to(x_ND.dtype)


def grouped_mm(rows_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """rows[ends[e−1]:ends[e]] @ weight[e] for every e, (M, O). ends_E int32, its last value M."""
    if rows_MI.dtype == torch.bfloat16:
        return F.grouped_mm(rows_MI, weight_EIO, offs=ends_E)
    if rows_MI.dtype == torch.float32:
        return _untraced(rows_MI, weight_EIO, ends_E)
    return _padded_bmm(rows_MI, weight_EIO, ends_E)


@torch.compiler.disable  # the rule by which the compiler infers a grouped product's shape refuses fp32
def _untraced(rows_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return F.grouped_mm(rows_MI, weight_EIO, offs=ends_E)


def _padded_bmm(rows_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """The same as one batched product over groups padded to the largest, for dtypes that `F.grouped_mm` lacks.
    Waits for the largest group's size."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1))
    expert = torch.repeat_interleave(torch.arange(len(ends_E), device=ends_E.device), sizes)
    place = torch.arange(len(rows_MI), device=ends_E.device) - (ends_E - sizes)[expert]
    padded = rows_MI.new_zeros(len(ends_E), int(sizes.max()), rows_MI.shape[1])
    padded = padded.index_put((expert, place), rows_MI)
    return torch.bmm(padded, weight_EIO)[expert, place]


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
