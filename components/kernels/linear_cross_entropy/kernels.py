"""A row of logits turned into its loss and, in place, its gradient: read once for the sum, once more for the gradient.

One program a row. With a softcap |y| < c, and c itself stands for the row's maximum, so no pass has to look for it.
Logarithms and exponentials are to base 2; y carries the factor log2(e). Shapes: V vocabulary.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:  # one instruction; relative error 2**-11
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _capped(z, softcap, CAPPED: tl.constexpr, APPROXIMATE: tl.constexpr):
    """log2(e)·c·tanh(z/c), and its derivative by z over log2(e)."""
    if CAPPED:
        t = _tanh(z / softcap, APPROXIMATE)
        return t * (softcap * LOG2E), 1.0 - t * t
    else:
        return z * LOG2E, tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _maximum(z, V, BLOCK: tl.constexpr):
    top_B = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        top_B = tl.maximum(top_B, tl.load(z + column, mask=column < V, other=float("-inf")).to(tl.float32))
    return tl.max(top_B, 0, keep_dims=True)


@triton.jit(do_not_specialize=["softcap"])
def loss_and_gradient(
    z,
    targets,
    losses,
    V,
    softcap,
    IGNORE: tl.constexpr,
    CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """losses[row] = −log softmax(y)[target] in nats; with GRADIENT z[row] becomes d(loss)/dz. Both are 0 where the
    target is IGNORE. BOUNDED: |y| < c does for the maximum."""
    row = tl.program_id(0).to(tl.int64)
    z += row * V
    target = tl.load(targets + row)
    if target == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(z + column, tl.zeros((BLOCK,), z.dtype.element_ty), mask=column < V)
        return

    top = softcap * LOG2E if BOUNDED else _capped(_maximum(z, V, BLOCK), softcap, CAPPED, APPROXIMATE)[0]
    total_B = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y, _ = _capped(tl.load(z + column, mask=column < V, other=0.0).to(tl.float32), softcap, CAPPED, APPROXIMATE)
        total_B += tl.where(column < V, tl.exp2(y - top), 0.0)
    lse = top + tl.log2(tl.sum(total_B, 0, keep_dims=True))
    one = tl.arange(0, 1)
    chosen, _ = _capped(tl.load(z + target + one).to(tl.float32), softcap, CAPPED, APPROXIMATE)
    tl.store(losses + row + one, (lse - chosen) * LN2)

    if GRADIENT:
        tl.debug_barrier()  # no warp may write the target's logit before all have read it
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            y, slope = _capped(
                tl.load(z + column, mask=column < V, other=0.0).to(tl.float32), softcap, CAPPED, APPROXIMATE
            )
            dz = (tl.exp2(y - lse) - tl.where(column == target, 1.0, 0.0)) * slope
            tl.store(z + column, dz.to(z.dtype.element_ty), mask=column < V)


@triton.jit
def scale(x, factor, y, N, BLOCK: tl.constexpr):
    """y = x · factor in the dtype of y."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(x + i, mask=i < N).to(tl.float32) * tl.load(factor)
    tl.store(y + i, scaled.to(y.dtype.element_ty), mask=i < N)
