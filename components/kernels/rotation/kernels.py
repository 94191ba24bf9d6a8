"""The gradient of a joint projection: a program writes a tile of rows and columns of one of its three pieces.

Shapes: N rows, K head width, r pairs of features that rotate, the first 2r of a head. A tile has whole heads, each in
groups of r features, so that the other feature of a pair stands in the same place of the group beside it.
"""

import triton
import triton.language as tl

from components.kernels.launcher import Kernel


@Kernel
@triton.jit(do_not_specialize=["N"])
def joint_gradient(
    first, second, third, cos, sin, joint, N, first_width, second_width, third_width,
    first_stride, second_stride, third_stride,
    TURNED: tl.constexpr, K: tl.constexpr, r: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """joint (N, all three widths), the first two pieces rotated back if TURNED. A program takes ROWS rows, HEADS heads;
    GROUPS and GROUP are powers of two that hold a head's groups and a group's features."""
    firsts, seconds = tl.cdiv(first_width, HEADS * K), tl.cdiv(second_width, HEADS * K)
    blocks = firsts + seconds + tl.cdiv(third_width, HEADS * K)
    width = first_width + second_width + third_width
    block, row = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    if block < firsts:
        _piece(
            first, cos, sin, joint, block, row, N, first_width, first_stride, width,
            TURNED, K, r, ROWS, HEADS, GROUPS, GROUP,
        )  # fmt: skip
    elif block < firsts + seconds:
        _piece(
            second, cos, sin, joint + first_width, block - firsts, row, N, second_width, second_stride, width,
            TURNED, K, r, ROWS, HEADS, GROUPS, GROUP,
        )  # fmt: skip
    else:
        _piece(
            third, cos, sin, joint + first_width + second_width, block - firsts - seconds, row, N, third_width,
            third_stride, width, False, K, r, ROWS, HEADS, GROUPS, GROUP,
        )  # fmt: skip


@triton.jit
def _piece(
    x, cos, sin, y, block, row, N, columns, x_stride, y_stride, TURNED: tl.constexpr, K: tl.constexpr, r: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    n = row + tl.arange(0, ROWS)[:, None, None, None]
    head = (block * HEADS + tl.arange(0, HEADS)[None, :, None, None]) * K
    group, i = tl.arange(0, GROUPS)[None, None, :, None], tl.arange(0, GROUP)[None, None, None, :]
    column = head + group * r + i
    inside = (n < N) & (column < columns) & (i < r) & (group * r + i < K)
    z = tl.load(x + n * x_stride + column, inside, other=0.0)
    if TURNED:
        beside = head + (group ^ 1) * r + i
        other = tl.load(x + n * x_stride + beside, inside & (group < 2), other=0.0).to(tl.float32)
        c = tl.load(cos + n * r + i, (n < N) & (i < r), other=0.0)
        s = tl.load(sin + n * r + i, (n < N) & (i < r), other=0.0)
        turned = z.to(tl.float32) * c + tl.where(group == 0, other, -other) * s
        z = tl.where(group < 2, turned.to(z.dtype), z)
    tl.store(y + n * y_stride + column, z, inside)
