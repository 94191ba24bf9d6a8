"""RMSNorm(o + D v) ⊙ weight ⊙ SiLU(gate) and its gradients; every element is read once and written once.

A tile holds BH heads of R / BH tokens: R rows of V features, padded to BV. BH divides H. Backward works the statistics
out again: the bytes of a root a row would cost more.

Shapes: N tokens, H heads, V head width. o, y and all gradients are dense; tokens of v and of the gate are apart by a
stride of their own, their H V features together.
"""

import triton
import triton.language as tl

from components.kernels.launcher import Kernel


@triton.jit
def _tile(t, head, N, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, BH: tl.constexpr):
    """Tokens (R, 1) from t on, their features (R, BV) from `head` on, and which of these exist."""
    r, c = tl.arange(0, R)[:, None], tl.arange(0, BV)[None, :]
    n = t + r // BH
    return n.to(tl.int64), (head + r % BH) * V + c, (n < N) & (c < V)


@triton.jit
def _of_heads(D, head, R: tl.constexpr, BH: tl.constexpr, SKIP: tl.constexpr):
    """D of each row of a tile, (R, 1)."""
    r = tl.arange(0, R)[:, None]
    if SKIP:
        return tl.load(D + head + r % BH).to(tl.float32)
    else:
        return tl.zeros((R, 1), tl.float32)


@triton.jit
def _weight(weight, V: tl.constexpr, BV: tl.constexpr, WEIGHT: tl.constexpr):
    c = tl.arange(0, BV)[None, :]
    if WEIGHT:
        return tl.load(weight + c, c < V, other=0.0).to(tl.float32)
    else:
        return tl.full((1, BV), 1.0, tl.float32)


@triton.jit
def _loaded(x, place, inside):
    return tl.load(x + place, inside, other=0.0).to(tl.float32)


@triton.jit
def _stored(x, place, value, inside):
    tl.store(x + place, value.to(x.dtype.element_ty), inside)


@Kernel
@triton.jit(do_not_specialize=["N"])
def gated_norm(
    o, v, D, weight, gate, y, N, v_stride, gate_stride, eps,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, BH: tl.constexpr,
    SKIP: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """One tile a program."""
    head = tl.program_id(0) % (H // BH) * BH
    n, f, inside = _tile(tl.program_id(0) // (H // BH) * (R // BH), head, N, V, BV, R, BH)
    x, g = _loaded(o, n * H * V + f, inside), _loaded(gate, n * gate_stride + f, inside)
    if SKIP:
        x += _of_heads(D, head, R, BH, SKIP) * _loaded(v, n * v_stride + f, inside)
    root = tl.rsqrt(tl.sum(x * x, 1)[:, None] / V + eps)
    _stored(y, n * H * V + f, x * root * _weight(weight, V, BV, WEIGHT) * g * tl.sigmoid(g), inside)


@Kernel
@triton.jit(do_not_specialize=["N", "span"])
def gated_norm_gradients(
    dy, o, v, D, weight, gate, do, dv, d_gate, shares, N, span, v_stride, gate_stride, eps,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, BH: tl.constexpr,
    SKIP: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Gradients of o, v and the gate, and the shares (programs, H + V) of those of D and the weight. A program takes
    `span` tokens, BH heads of all of them before the next ones."""
    start = tl.program_id(0) * span
    shares += tl.program_id(0) * (H + V)
    w = _weight(weight, V, BV, WEIGHT)
    dw = tl.zeros((R, BV), tl.float32)
    for head in range(0, H, BH):
        skip = _of_heads(D, head, R, BH, SKIP)
        d_skip = tl.zeros((R,), tl.float32)
        for t in range(start, tl.minimum(start + span, N), R // BH):
            n, f, inside = _tile(t, head, N, V, BV, R, BH)
            dense = n * H * V + f
            grad, x = _loaded(dy, dense, inside), _loaded(o, dense, inside)
            g = _loaded(gate, n * gate_stride + f, inside)
            if SKIP:
                value = _loaded(v, n * v_stride + f, inside)
                x += skip * value
            root = tl.rsqrt(tl.sum(x * x, 1)[:, None] / V + eps)
            x *= root
            s = tl.sigmoid(g)
            _stored(d_gate, dense, grad * x * w * s * (1 + g * (1 - s)), inside)
            grad *= g * s
            dw += grad * x
            grad *= w
            dx = root * (grad - x * (tl.sum(grad * x, 1)[:, None] / V))
            _stored(do, dense, dx, inside)
            if SKIP:
                _stored(dv, dense, skip * dx, inside)
                d_skip += tl.sum(dx * value, 1)
        if SKIP:
            tl.store(shares + head + tl.arange(0, BH), tl.sum(tl.reshape(d_skip, (R // BH, BH)), 0))
    if WEIGHT:
        c = tl.arange(0, BV)
        tl.store(shares + H + c, tl.sum(dw, 0), c < V)


@Kernel
@triton.jit(do_not_specialize=["programs"])
def reduce_shares(
    shares, dD, dweight, programs,
    H: tl.constexpr, V: tl.constexpr, SKIP: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums over the programs, always in the same order: H of D, then V of the weight. BC of them a program."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    needed = (c < H) & SKIP | (c >= H) & (c < H + V) & WEIGHT
    total = tl.zeros((ROWS, BC), tl.float32)
    for i in range(0, programs, ROWS):
        row = i + tl.arange(0, ROWS)[:, None]
        total += tl.load(shares + row * (H + V) + c, (row < programs) & needed, other=0.0)
    if SKIP:
        _stored(dD, c, tl.sum(total, 0), c < H)
    if WEIGHT:
        _stored(dweight, c - H, tl.sum(total, 0), (c >= H) & (c < H + V))
