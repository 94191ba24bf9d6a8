"""NorMuon's factors of rows from the rows' norms, a program a matrix."""

import triton
import triton.language as tl


@triton.jit
def even_rows(norm, second_moment, factor, m, kept, added, scale, eps, tiny, BLOCK: tl.constexpr):
    """All three tensors are contiguous (N, m), fp32; BLOCK is at least m. `second_moment` is updated in place."""
    at = tl.arange(0, BLOCK)
    here, inside = tl.program_id(0).to(tl.int64) * m + at, at < m
    n = tl.load(norm + here, mask=inside, other=0.0)
    v = kept * tl.load(second_moment + here, mask=inside, other=0.0) + added * n * n
    tl.store(second_moment + here, v, mask=inside)
    even = 1 / (tl.sqrt_rn(v) + eps)
    before, after = tl.sum(n * n), tl.sum(n * even * n * even)
    tl.store(factor + here, even * tl.sqrt_rn(before / tl.maximum(after, tiny)) * scale, mask=inside)
