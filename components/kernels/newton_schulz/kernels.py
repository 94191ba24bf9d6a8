"""The products and the scaling of Newton-Schulz in Triton: half the tiles of a symmetric product, each stored twice.

Shapes: N matrices, x_NRK of R rows and K columns, R×R results. Results are symmetric bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def _lower_tile(t, WIDE: tl.constexpr):
    """Row and column of the t-th tile that reaches the diagonal or what is below it. A tile is WIDE times as wide as it
    is high, so WIDE rows of tiles have as many of them: 1, then 2, then 3."""
    group = ((tl.sqrt(8.0 * (t // WIDE) + 1.0) - 1.0) / 2.0).to(tl.int32)
    group = tl.where(group * (group + 1) // 2 > t // WIDE, group - 1, group)  # rounding of the root
    group = tl.where((group + 1) * (group + 2) // 2 <= t // WIDE, group + 1, group)
    t -= WIDE * (group * (group + 1) // 2)
    return group * WIDE + t % WIDE, t // WIDE


@triton.jit(do_not_specialize=["tiles", "alpha", "beta", "diagonal"])
def symmetric_product(
    x,
    added,
    factor,
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
    SCALE: tl.constexpr,
    WHOLE: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BK: tl.constexpr,
):
    """out = factor (alpha x xᵀ + beta added + diagonal I). `added` (symmetric) and `out` are contiguous (N, R, R),
    `factor` is (N,). A program makes one tile of HIGH rows and HIGH · WIDE columns, of `tiles` a matrix. WHOLE: HIGH ·
    WIDE divides R and BK K."""
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    i, j = _lower_tile(tl.program_id(0) % tiles, WIDE)
    if i * HIGH >= R:
        return
    r, c, k = i * HIGH + tl.arange(0, HIGH), j * HIGH * WIDE + tl.arange(0, HIGH * WIDE), tl.arange(0, BK)
    x += matrix * x_matrix
    added += matrix * R * R
    out += matrix * R * R
    left = x + r[:, None] * x_row + k[None, :] * x_column
    right = x + c[None, :] * x_row + k[:, None] * x_column
    total = tl.zeros((HIGH, HIGH * WIDE), tl.float32)
    for start in range(0, K, BK):
        if WHOLE:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, mask=(r < R)[:, None] & (k < K - start)[None, :], other=0.0)
            b = tl.load(right, mask=(c < R)[None, :] & (k < K - start)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BK * x_column
        right += BK * x_column
    total *= alpha
    here, inside = r[:, None] * R + c[None, :], (r < R)[:, None] & (c < R)[None, :]
    if ADD:
        total += beta * tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(r[:, None] == c[None, :], diagonal, 0.0)
    if SCALE:
        total *= tl.load(factor + matrix)
    result = total.to(out.dtype.element_ty)
    tl.store(out + here, result, mask=inside)
    if i >= (j + 1) * WIDE:
        tl.store(out + c[:, None] * R + r[None, :], tl.trans(result), mask=(c < R)[:, None] & (r < R)[None, :])


@triton.jit
def scale(x, factor, out, R, K, f_matrix, f_step, BY_COLUMN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """out = x · factor, both contiguous (N, R, K). A factor for each row, `f_step` apart (0: one for a matrix), or for
    each column."""
    down, across = tl.cdiv(R, BR), tl.cdiv(K, BK)
    block = tl.program_id(0) % (down * across)
    matrix = (tl.program_id(0) // (down * across)).to(tl.int64)
    r, k = block // across * BR + tl.arange(0, BR), block % across * BK + tl.arange(0, BK)
    factor += matrix * f_matrix
    if BY_COLUMN:
        f = tl.load(factor + k * f_step, mask=k < K, other=0.0)[None, :]
    else:
        f = tl.load(factor + r * f_step, mask=r < R, other=0.0)[:, None]
    here, inside = r[:, None] * K + k[None, :], (r < R)[:, None] & (k < K)[None, :]
    values = tl.load(x + matrix * R * K + here, mask=inside, other=0.0).to(f.dtype)
    tl.store(out + matrix * R * K + here, (values * f).to(out.dtype.element_ty), mask=inside)
