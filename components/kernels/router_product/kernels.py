"""The product of many rows with few columns, and its gradients, in exact fp32. Shapes: N tokens, D width, E experts.

All tensors are contiguous. x may be bf16 or fp16: it becomes fp32 in registers.
"""

import triton
import triton.language as tl


@triton.jit
def product(x, weight, y, N, D, E, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """A program takes BN tokens and BE experts."""
    n, e = _block(0, BN), _block(1, BE)
    total = tl.zeros((BN, BE), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x_ND = _tile(x, n, d, N, D)
        weight_DE = tl.load(weight + e[None, :] * D + d[:, None], (e[None, :] < E) & (d[:, None] < D), other=0.0)
        total = tl.dot(x_ND, weight_DE, total, input_precision="ieee")
    tl.store(y + n[:, None] * E + e[None, :], total, (n[:, None] < N) & (e[None, :] < E))


@triton.jit
def input_gradient(dy, weight, dx, N, D, E, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """A program takes BN tokens and BD columns."""
    n, d = _block(0, BN), _block(1, BD)
    total = tl.zeros((BN, BD), tl.float32)
    for start in range(0, E, BE):
        e = start + tl.arange(0, BE)
        total = tl.dot(_tile(dy, n, e, N, E), _tile(weight, e, d, E, D), total, input_precision="ieee")
    tl.store(dx + n[:, None] * D + d[None, :], total.to(dx.dtype.element_ty), (n[:, None] < N) & (d[None, :] < D))


@triton.jit
def weight_gradient(dy, x, shares, N, D, E, ROWS, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """A program takes BD columns and BE experts of the share of ROWS tokens; `shares` is (shares, E, D)."""
    share, d, e = tl.program_id(0), _block(1, BD), _block(2, BE)
    total = tl.zeros((BE, BD), tl.float32)
    for start in range(0, ROWS, BN):
        n = share.to(tl.int64) * ROWS + start + tl.arange(0, BN)
        dy_EN = tl.load(dy + n[None, :] * E + e[:, None], (n[None, :] < N) & (e[:, None] < E), other=0.0)
        total = tl.dot(dy_EN, _tile(x, n, d, N, D), total, input_precision="ieee")
    mine = shares + share.to(tl.int64) * E * D
    tl.store(mine + e[:, None] * D + d[None, :], total, (e[:, None] < E) & (d[None, :] < D))


@triton.jit
def _block(axis: tl.constexpr, SIZE: tl.constexpr):
    return tl.program_id(axis).to(tl.int64) * SIZE + tl.arange(0, SIZE)


@triton.jit
def _tile(x, row, column, R, C):
    """Of a contiguous (R, C), in fp32, zero outside."""
    inside = (row[:, None] < R) & (column[None, :] < C)
    return tl.load(x + row[:, None] * C + column[None, :], inside, other=0.0).to(tl.float32)
