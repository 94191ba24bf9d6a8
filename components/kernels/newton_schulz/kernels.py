"""The symmetric products of Newton-Schulz in Triton: half the tiles of a batched matrix product, each stored twice.

Shapes: N matrices, x_NRK of R rows and K columns, R×R results. A program makes one tile on or below the diagonal of one
matrix's result, and writes it mirrored above the diagonal too. So the result is symmetric bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def _row_and_column(tile):
    """The tile-th pair (i, j) of (0, 0), (1, 0), (1, 1), (2, 0), ..."""
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # rounding of the root
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit(do_not_specialize=["alpha", "beta", "diagonal"])
def symmetric_product(
    x,
    added,
    out,
    R,
    K,
    x_matrix,
    x_row,
    x_column,
    tiles,
    alpha,
    beta,
    diagonal,
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    BK: tl.constexpr,
):
    """out = alpha x xᵀ + beta added + diagonal I. `added` (symmetric) and `out` are contiguous (N, R, R). WHOLE: tiles
    and blocks of columns divide R and K."""
    pid = tl.program_id(0)
    matrix = (pid // tiles).to(tl.int64)
    i, j = _row_and_column(pid % tiles)
    r, c, k = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, BK)
    x += matrix * x_matrix
    added += matrix * R * R
    out += matrix * R * R
    left = x + r[:, None] * x_row + k[None, :] * x_column
    right = x + c[None, :] * x_row + k[:, None] * x_column
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, BK):
        if WHOLE:
            a, b = tl.load(left), tl.load(right)
        else:
            inside = k < K - start
            a = tl.load(left, mask=(r < R)[:, None] & inside[None, :], other=0.0)
            b = tl.load(right, mask=(c < R)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BK * x_column
        right += BK * x_column
    total *= alpha
    here = r[:, None] * R + c[None, :]
    inside = (r < R)[:, None] & (c < R)[None, :]
    if ADD:
        total += beta * tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(r[:, None] == c[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    tl.store(out + here, result, mask=inside)
    if i != j:
        tl.store(out + c[:, None] * R + r[None, :], tl.trans(result), mask=(c < R)[:, None] & (r < R)[None, :])
