"""The gradient of a joint projection: a program writes a tile of rows and columns of one of its three pieces.

Shapes: N rows, K head width, r pairs of features that rotate, the first 2r of a head. A tile has whole heads, in sets
of r pairs of which the first rotates. A thread loads a set, or part of one, at once and takes pairs apart in registers.
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
    ROWS: tl.constexpr, HEADS: tl.constexpr, SETS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """joint (N, all three widths), the first two pieces rotated back if TURNED. A program takes ROWS rows, HEADS heads;
    SETS and PAIRS are powers of two that hold a head's sets and a set's pairs."""
    firsts, seconds = tl.cdiv(first_width, HEADS * K), tl.cdiv(second_width, HEADS * K)
    blocks = firsts + seconds + tl.cdiv(third_width, HEADS * K)
    width = first_width + second_width + third_width
    block, row = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    if block < firsts:
        _piece(
            first, cos, sin, joint, block, row, N, first_width, first_stride, width,
            TURNED, K, r, ROWS, HEADS, SETS, PAIRS,
        )  # fmt: skip
    elif block < firsts + seconds:
        _piece(
            second, cos, sin, joint + first_width, block - firsts, row, N, second_width, second_stride, width,
            TURNED, K, r, ROWS, HEADS, SETS, PAIRS,
        )  # fmt: skip
    else:
        _piece(
            third, cos, sin, joint + first_width + second_width, block - firsts - seconds, row, N, third_width,
            third_stride, width, False, K, r, ROWS, HEADS, SETS, PAIRS,
        )  # fmt: skip


@triton.jit
def _piece(
    x, cos, sin, y, block, row, N, columns, x_stride, y_stride, TURNED: tl.constexpr, K: tl.constexpr, r: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SETS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    n, i = row + tl.arange(0, ROWS)[:, None], tl.arange(0, HEADS * SETS * 2 * PAIRS)[None, :]
    if SETS * 2 * PAIRS == K:
        column = block * HEADS * K + i
        inside = (n < N) & (column < columns)
    else:
        head, half, pair = i // (SETS * 2 * PAIRS), i // PAIRS % 2, i % PAIRS
        feature = (i // (2 * PAIRS) % SETS * 2 + half) * r + pair
        column = (block * HEADS + head) * K + feature
        inside = (n < N) & (column < columns) & (pair < r) & (feature < K)
    z = tl.load(x + n * x_stride + column, inside, other=0.0)
    if TURNED:
        z = _turned_back(z, cos, sin, row, N, r, ROWS, HEADS, SETS, PAIRS)
    tl.store(y + n * y_stride + column, z, inside)


@triton.jit
def _turned_back(
    z, cos, sin, row, N, r: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SETS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A tile with its first sets rotated back. The other sets turn by nothing, which leaves them as they are."""
    pairs = tl.trans(tl.reshape(z, (ROWS, HEADS, SETS, 2, PAIRS)), (0, 1, 2, 4, 3))
    first, second = tl.split(pairs.to(tl.float32))
    n, i = row + tl.arange(0, ROWS)[:, None, None, None], tl.arange(0, PAIRS)[None, None, None, :]
    turns = (n < N) & (i < r) & (tl.arange(0, SETS)[None, None, :, None] == 0)
    c, s = tl.load(cos + n * r + i, turns, other=1.0), tl.load(sin + n * r + i, turns, other=0.0)
    turned = tl.join(first * c + second * s, second * c - first * s)
    return tl.reshape(tl.trans(turned, (0, 1, 2, 4, 3)), (ROWS, HEADS * SETS * 2 * PAIRS)).to(z.dtype)
