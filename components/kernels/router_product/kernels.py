"""The product of many rows with few columns, and its gradients, to fp32. Shapes: N tokens, D width, E experts.

All tensors are contiguous. An fp32 number is the sum of three of bf16, so a product of bf16 by fp32 is three of bf16,
each exact, for tensor cores that sum in fp32. What is not bf16 becomes fp32 in registers and is multiplied there.
"""

import triton
import triton.language as tl


@triton.jit
def router_product(x, weight, y, N, D, E, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """A program takes BN tokens and BE experts."""
    n, e = _block(0, BN), _block(1, BE)
    total = tl.zeros((BN, BE), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        weight_DE = tl.load(weight + e[None, :] * D + d[:, None], (e[None, :] < E) & (d[:, None] < D), other=0.0)
        total = _plus_product(total, _tile(x, n, d, N, D), weight_DE)
    tl.store(y + n[:, None] * E + e[None, :], total, (n[:, None] < N) & (e[None, :] < E))


@triton.jit
def router_input_gradient(dy, weight, dx, N, D, E, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """A program takes BN tokens and BD columns."""
    n, d = _block(0, BN), _block(1, BD)
    total = tl.zeros((BN, BD), tl.float32)
    for start in range(0, E, BE):
        e = start + tl.arange(0, BE)
        total = _plus_product(total, _tile(dy, n, e, N, E), _tile(weight, e, d, E, D))
    tl.store(dx + n[:, None] * D + d[None, :], total.to(dx.dtype.element_ty), (n[:, None] < N) & (d[None, :] < D))


@triton.jit
def router_weight_gradient(dy, x, shares, N, D, E, ROWS, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """A program takes BD columns and BE experts of the share of ROWS tokens; `shares` is (shares, E, D)."""
    share, d, e = tl.program_id(0), _block(1, BD), _block(2, BE)
    total = tl.zeros((BD, BE), tl.float32)
    for start in range(0, ROWS, BN):
        n = share.to(tl.int64) * ROWS + start + tl.arange(0, BN)
        x_DN = tl.load(x + n[None, :] * D + d[:, None], (n[None, :] < N) & (d[:, None] < D), other=0.0)
        total = _plus_product(total, x_DN, _tile(dy, n, e, N, E))
    mine = shares + share.to(tl.int64) * E * D
    tl.store(mine + e[None, :] * D + d[:, None], total, (e[None, :] < E) & (d[:, None] < D))


@triton.jit
def _plus_product(total, x, exact):
    """total + x @ exact, of which `exact` is fp32."""
    if x.dtype == tl.bfloat16:
        high = exact.to(tl.bfloat16)
        rest = exact - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low, total)))
    else:
        return tl.dot(x.to(tl.float32), exact, total, input_precision="ieee")


@triton.jit
def _block(axis: tl.constexpr, SIZE: tl.constexpr):
    return tl.program_id(axis).to(tl.int64) * SIZE + tl.arange(0, SIZE)


@triton.jit
def _tile(x, row, column, R, C):
    """Of a contiguous (R, C), zero outside."""
    inside = (row[:, None] < R) & (column[None, :] < C)
    return tl.load(x + row[:, None] * C + column[None, :], inside, other=0.0)
