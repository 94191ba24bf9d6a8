"""The short convolution in Triton: a program walks along the tokens of a block with the last inputs in registers.

So every element is read once and written once. Four tokens are loaded at a time to keep loads in flight. Up to four
taps; narrower kernels carry zero weights. `distance` is each token's place in its document, where documents are packed.

Shapes: C channels (BC a program), S columns beside them, BT tokens a program, W taps. Tap j multiplies the token j
before.
"""

import triton
import triton.language as tl

from components.kernels.launcher import Kernel


@Kernel
@triton.jit(do_not_specialize=["tokens", "documents", "steps"])
def distances(cu, distance, tokens, documents, steps, BLOCK: tl.constexpr):
    """distance[t]: token t's place in its document. Binary search over the starts, `steps` halvings."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + documents
    for _ in range(steps):
        middle = (low + high) // 2
        here = (tl.load(cu + middle) <= token) & (middle < documents)
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    tl.store(distance + token, token - tl.load(cu + low), mask=token < tokens)


@triton.jit
def _place(T, C, BT: tl.constexpr, BC: tl.constexpr):
    """This program's row, first token in it, and channels."""
    pid = tl.program_id(0)
    blocks_C, blocks_T = tl.cdiv(C, BC), tl.cdiv(T, BT)
    c = pid % blocks_C * BC + tl.arange(0, BC)
    block = pid // blocks_C
    return block // blocks_T, block % blocks_T * BT, c, block


@triton.jit
def _tap(w, c, back: tl.constexpr, C, W: tl.constexpr):
    if back < W:
        return tl.load(w + c * W + (W - 1 - back), mask=c < C, other=0.0).to(tl.float32)
    else:
        return tl.zeros(c.shape, tl.float32)


@triton.jit
def _raw(x, t, T, stride, c, C):
    """Channels c of token t, zero outside the row, in their dtype: a loop can hand them on without waiting for them."""
    return tl.load(x + t * stride + c, mask=(c < C) & (t >= 0) & (t < T), other=0.0)


@triton.jit
def _token(x, t, T, stride, c, C):
    return _raw(x, t, T, stride, c, C).to(tl.float32)


@triton.jit
def _taps(w, c, C, W: tl.constexpr):
    return _tap(w, c, 0, C, W), _tap(w, c, 1, C, W), _tap(w, c, 2, C, W), _tap(w, c, 3, C, W)


@triton.jit
def _before(x, t, T, stride, c, C):
    """The three tokens before t, zero before the row's first."""
    x1, x2 = _token(x, t - 1, T, stride, c, C), _token(x, t - 2, T, stride, c, C)
    return x1, x2, _token(x, t - 3, T, stride, c, C)


@triton.jit
def _distance(distance, t, T, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(distance + t, mask=t < T, other=0)
    else:
        return t


@triton.jit
def _own(x, place, back: tl.constexpr, PACKED: tl.constexpr):
    """x, which stands `back` tokens before, unless that is another document. Rows need no test: zeros lead them."""
    if PACKED:
        return tl.where(place >= back, x, 0.0)
    else:
        return x


@triton.jit
def _weighted(x0, x1, x2, x3, w0, w1, w2, w3, place, PACKED: tl.constexpr):
    """The convolution at one token, over the taps that lie in its document."""
    z = w0 * x0 + w1 * _own(x1, place, 1, PACKED)
    return z + w2 * _own(x2, place, 2, PACKED) + w3 * _own(x3, place, 3, PACKED)


@triton.jit
def _put(y, t, T, C, c, x0, x1, x2, x3, w0, w1, w2, w3, place, PACKED: tl.constexpr, SILU: tl.constexpr):
    z = _weighted(x0, x1, x2, x3, w0, w1, w2, w3, place, PACKED)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + t * C + c, z.to(y.dtype.element_ty), mask=(c < C) & (t < T))


@Kernel
@triton.jit(do_not_specialize=["T"])
def short_conv(
    x, w, distance, y, T, C, x_stride,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    row, start, c, _ = _place(T, C, BT, BC)
    first = (row * T).to(tl.int64)
    x += first * x_stride
    y += first * C
    distance += first
    w0, w1, w2, w3 = _taps(w, c, C, W)
    x1, x2, x3 = _before(x, start, T, x_stride, c, C)
    for i in range(0, BT, 4):
        t = start + i
        a, b = _token(x, t, T, x_stride, c, C), _token(x, t + 1, T, x_stride, c, C)
        d, e = _token(x, t + 2, T, x_stride, c, C), _token(x, t + 3, T, x_stride, c, C)
        _put(y, t, T, C, c, a, x1, x2, x3, w0, w1, w2, w3, _distance(distance, t, T, PACKED), PACKED, SILU)
        _put(y, t + 1, T, C, c, b, a, x1, x2, w0, w1, w2, w3, _distance(distance, t + 1, T, PACKED), PACKED, SILU)
        _put(y, t + 2, T, C, c, d, b, a, x1, w0, w1, w2, w3, _distance(distance, t + 2, T, PACKED), PACKED, SILU)
        _put(y, t + 3, T, C, c, e, d, b, a, w0, w1, w2, w3, _distance(distance, t + 3, T, PACKED), PACKED, SILU)
        x1, x2, x3 = e, d, b


@triton.jit
def _slope(dy, x0, x1, x2, x3, w0, w1, w2, w3, place, PACKED: tl.constexpr, SILU: tl.constexpr):
    """The gradient of the convolution before SiLU."""
    if SILU:
        z = _weighted(x0, x1, x2, x3, w0, w1, w2, w3, place, PACKED)
        s = tl.sigmoid(z)
        dy = dy * s * (1.0 + z * (1.0 - s))
    return dy


@triton.jit
def _sum(dys, USES: tl.constexpr):
    """In fp32, in their order."""
    total = dys[0].to(tl.float32)
    for i in tl.static_range(1, USES):
        total += dys[i].to(tl.float32)
    return total


@Kernel
@triton.jit(do_not_specialize=["T"])
def short_conv_gradients(
    dy0, dy1, dy2, dy3, x, w, distance, dx, shares, T, C, S, x_stride,
    USES: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dx, in rows of C + S, and each block's share of dw (blocks, 4, C), from the gradients of the first USES of four
    results. Walks three tokens past the block: they look back into it."""
    row, start, c, block = _place(T, C, BT, BC)
    first = (row * T).to(tl.int64)
    x += first * x_stride
    dys = (dy0 + first * C, dy1 + first * C, dy2 + first * C, dy3 + first * C)[:USES]
    dx += first * (C + S)
    distance += first
    stop = tl.minimum(start + BT, T)
    w0, w1, w2, w3 = _taps(w, c, C, W)
    x1, x2, x3 = _before(x, start, T, x_stride, c, C)
    dw0, dw1, dw2, dw3 = (tl.zeros((BC,), tl.float32),) * 4
    one, two, three = (tl.zeros((BC,), tl.float32),) * 3  # what has come for the inputs 1, 2, 3 tokens back
    raw_x, raw_dys = _raw(x, start, T, x_stride, c, C), [_raw(p, start, T, C, c, C) for p in dys]
    next_x, next_dys = _raw(x, start + 1, T, x_stride, c, C), [_raw(p, start + 1, T, C, c, C) for p in dys]
    for t in range(start, start + BT + 3):
        late_x, late_dys = _raw(x, t + 2, T, x_stride, c, C), [_raw(p, t + 2, T, C, c, C) for p in dys]
        x0, dy = raw_x.to(tl.float32), _sum(raw_dys, USES)
        place = _distance(distance, t, T, PACKED)
        dz = _slope(dy, x0, x1, x2, x3, w0, w1, w2, w3, place, PACKED, SILU)
        dz1, dz2, dz3 = _own(dz, place, 1, PACKED), _own(dz, place, 2, PACKED), _own(dz, place, 3, PACKED)
        three += w3 * dz3
        inside = (c < C) & (t - 3 >= start) & (t - 3 < stop)
        tl.store(dx + (t - 3) * (C + S) + c, three.to(dx.dtype.element_ty), mask=inside)
        if t < stop:
            dw0 += dz * x0
            dw1 += dz1 * x1
            dw2 += dz2 * x2
            dw3 += dz3 * x3
        three, two, one = two + w2 * dz2, one + w1 * dz1, w0 * dz
        x3, x2, x1 = x2, x1, x0
        raw_x, raw_dys, next_x, next_dys = next_x, next_dys, late_x, late_dys
    share = shares + block * 4 * C + c
    tl.store(share, dw0, mask=c < C)
    tl.store(share + C, dw1, mask=c < C)
    tl.store(share + 2 * C, dw2, mask=c < C)
    tl.store(share + 3 * C, dw3, mask=c < C)


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def pass_on(d_rest, dx, tokens, C, S, stride, BT: tl.constexpr, BC: tl.constexpr):
    """d_rest (tokens, S) to the columns past the first C of dx (tokens, C + S). Apart: as other programs of
    `short_conv_gradients` it would take 12 registers from those that convolve."""
    blocks = tl.cdiv(S, BC)
    t = (tl.program_id(0) // blocks).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    s = tl.program_id(0) % blocks * BC + tl.arange(0, BC)[None, :]
    inside = (t < tokens) & (s < S)
    tl.store(dx + t * (C + S) + C + s, tl.load(d_rest + t * stride + s, mask=inside, other=0.0), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["blocks"])
def reduce_shares(shares, dw, blocks, C, W: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr):
    """dw from the blocks' shares, always summed in the same order. One program a tap and BC channels."""
    back = tl.program_id(0) % W
    c = tl.program_id(0) // W * BC + tl.arange(0, BC)
    total = tl.zeros((ROWS, BC), tl.float32)
    for i in range(0, blocks, ROWS):
        block = i + tl.arange(0, ROWS)
        inside = (block < blocks)[:, None] & (c < C)[None, :]
        total += tl.load(shares + (block[:, None] * 4 + back) * C + c[None, :], mask=inside, other=0.0)
    tl.store(dw + c * W + (W - 1 - back), tl.sum(total, 0).to(dw.dtype.element_ty), mask=c < C)
