"""The gradient of a joint projection that was taken apart into three pieces, two of them rotated, as one op.

Left to a compiler the rotations back, the pieces and their concatenation are four kernels or more, which read and write
everything twice (docs/kernels.md). Shapes: B batch, T sequence, K head width, r pairs that rotate.
"""

import torch
import triton
from torch import Tensor

from components.kernels.rotation import kernels
from components.kernels.rotation.reference import joint_gradient_reference

ROWS, COLUMNS, WARPS = 8, 256, 4  # a program's tile, and who works on it


def joint_gradient(
    first: Tensor, second: Tensor, third: Tensor, cos_BTr: Tensor | None, sin_BTr: Tensor | None, head_dim: int
) -> Tensor:
    """Three gradients (B, T, width), the first two rotated back in heads of `head_dim`, side by side in their dtype.

    Without angles nothing is rotated and leading axes are free. Angles are fp32. Pairs are those of `reference.turn`;
    computed in fp32 (float64 for float64).
    """
    return torch.ops.hymo.joint_gradient(first, second, third, cos_BTr, sin_BTr, head_dim)


def launch(
    first: Tensor, second: Tensor, third: Tensor, cos_BTr: Tensor | None, sin_BTr: Tensor | None, head_dim: int
) -> Tensor:
    """The Triton form."""
    pieces = [_rows(x) for x in (first, second, third)]
    N, widths, strides = len(pieces[0]), [x.shape[1] for x in pieces], [x.stride(0) for x in pieces]
    joint = first.new_empty(*first.shape[:-1], sum(widths))
    turned = cos_BTr is not None
    angles = (cos_BTr.contiguous(), sin_BTr.contiguous()) if turned else (first, first)  # or not read
    tile = _tile(head_dim, cos_BTr.shape[-1]) if turned else _tile(COLUMNS, 8)
    blocks = sum(triton.cdiv(width, tile["HEADS"] * tile["K"]) for width in widths)
    kernels.joint_gradient(
        triton.cdiv(N, ROWS) * blocks, *pieces, *angles, joint, N, *widths, *strides,
        TURNED=turned, **tile, num_warps=WARPS, enable_fp_fusion=False,  # rounds as PyTorch does
    )  # fmt: skip
    return joint


def _rows(x: Tensor) -> Tensor:
    """(N, width) with columns that lie together: a view if x allows it."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(K: int, r: int) -> dict[str, int]:
    sets, pairs = triton.next_power_of_2(triton.cdiv(K, 2 * r)), triton.next_power_of_2(r)
    heads = max(1, COLUMNS // (sets * 2 * pairs))
    return {"K": K, "r": r, "ROWS": ROWS, "HEADS": heads, "SETS": sets, "PAIRS": pairs}


# Defined by its schema: what `torch.library.custom_op` checks at every call takes longer than the launch.
_NAME, _TAGS = "hymo::joint_gradient", (torch.Tag.pt2_compliant_tag,)
_INPUTS = "Tensor first, Tensor second, Tensor third, Tensor? cos, Tensor? sin, int head_dim"
torch.library.define(_NAME, f"({_INPUTS}) -> Tensor", tags=_TAGS)


@torch.library.impl(_NAME, ("cpu", "cuda"))
def _joint_gradient(first, second, third, cos, sin, head_dim):
    in_triton = first.is_cuda and first.dtype != torch.float64
    return (launch if in_triton else joint_gradient_reference)(first, second, third, cos, sin, head_dim)


@torch.library.register_fake(_NAME)
def _(first, second, third, cos, sin, head_dim):
    return first.new_empty(*first.shape[:-1], first.shape[-1] + second.shape[-1] + third.shape[-1])
