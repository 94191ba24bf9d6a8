"""Products of rows that lie sorted by expert with their experts' matrices, and the gradient of the matrices, in fp32.

The grids follow from shapes alone: a program finds its expert in `ends` on the device, and programs that find none
return. Every tile of a result belongs to one program, which sums it in a fixed order: results repeat bit for bit.
Shapes: M rows, E experts, P and Q widths in and out; a tile BM, BP, BQ of them, BE the power of two that holds E.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_product(
    rows,
    weight,
    y,
    ends,
    E,
    P,
    Q,
    stride_e,
    stride_p,
    stride_q,
    PRECISION: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    BQ: tl.constexpr,
):
    """A tile of y_MQ = rows_MP @ weight[expert]. Strides are those of `weight`, which may lie transposed."""
    program, across = tl.program_id(0), tl.cdiv(Q, BQ)
    expert, start, end = _expert_of_tile(program // across, ends, E, BE, BM)
    if expert >= E:
        return
    m = (start + tl.arange(0, BM)[:, None]).to(tl.int64)
    q = program % across * BQ + tl.arange(0, BQ)[None, :]
    rows += m * P
    weight += expert.to(tl.int64) * stride_e + q * stride_q
    total = tl.zeros((BM, BQ), tl.float32)
    for first in range(0, P, BP):
        p = first + tl.arange(0, BP)
        a = tl.load(rows + p[None, :], (m < end) & (p[None, :] < P), other=0.0)
        w = tl.load(weight + p[:, None] * stride_p, (p[:, None] < P) & (q < Q), other=0.0)
        total = tl.dot(a, w, total, input_precision=PRECISION)
    tl.store(y + m * Q + q, total, (m < end) & (q < Q))


@triton.jit
def grouped_weight_gradient(
    rows,
    dy,
    dweight,
    ends,
    P,
    Q,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    BQ: tl.constexpr,
):
    """A tile of dweight[expert] = rowsᵀ @ dy over the expert's rows; zeros where it has none."""
    program, down, across = tl.program_id(0), tl.cdiv(P, BP), tl.cdiv(Q, BQ)
    expert = (program // (down * across)).to(tl.int64)
    start = tl.load(ends + expert - 1, expert > 0, other=0)
    end = tl.load(ends + expert)
    p = program // across % down * BP + tl.arange(0, BP)[:, None]
    q = program % across * BQ + tl.arange(0, BQ)[None, :]
    total = tl.zeros((BP, BQ), tl.float32)
    for first in range(start, end, BM):
        m = (first + tl.arange(0, BM)).to(tl.int64)
        a = tl.load(rows + m[None, :] * P + p, (m[None, :] < end) & (p < P), other=0.0)
        b = tl.load(dy + m[:, None] * Q + q, (m[:, None] < end) & (q < Q), other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(dweight + (expert * P + p) * Q + q, total, (p < P) & (q < Q))


@triton.jit
def _expert_of_tile(tile, ends, E, BE: tl.constexpr, BM: tl.constexpr):
    """The expert whose rows hold the tile, the tile's first row and the end of the expert's; BE for a tile too many."""
    e = tl.arange(0, BE)
    start_E = tl.load(ends + e - 1, (e > 0) & (e < E), other=0)
    end_E = tl.load(ends + e, e < E, other=0)
    tiles_E = tl.cdiv(end_E - start_E, BM)
    past_E = tl.cumsum(tiles_E, 0)  # the first tile of the next expert
    expert = tl.sum((past_E <= tile).to(tl.int32), 0)
    first_E = start_E + (tile - past_E + tiles_E) * BM
    return expert, tl.sum(tl.where(e == expert, first_E, 0), 0), tl.sum(tl.where(e == expert, end_E, 0), 0)
