"""What the Triton kernels of the gated delta rule share: where documents, segments and chunks lie, gates, helpers.

A sequence is cut into segments of L tokens (for wide heads a segment is a chunk). Tokens are numbered over all rows. A
document that starts at token t owns the segment slots from t // L + (its number) on, and the chunk slots likewise:
distinct for all documents, without any prefix sum. Decays are in powers of two.

Shapes: H value heads, K, V widths, C chunk, L segment.
"""

import triton
import triton.language as tl

from components.kernels.launcher import Kernel

LOG2E = tl.constexpr(1.4426950408889634)
FLOOR = tl.constexpr(-80.0)
EPS = tl.constexpr(1e-6)


@triton.jit
def document_bounds(document, cu, T, L: tl.constexpr, PACKED: tl.constexpr):
    """A document's [begin, end) and its first segment slot."""
    if PACKED:
        begin = tl.load(cu + document)
        end = tl.load(cu + document + 1)
        slot = begin // L + document
    else:
        begin = document * T
        end = begin + T
        slot = document * tl.cdiv(T, L)
    return begin, end, slot


@triton.jit
def segment_bounds(slot, cu, slots, T, L: tl.constexpr, PACKED: tl.constexpr):
    """The segment's [start, stop), its document's number and [begin, end). An unused slot has start > stop."""
    document = tl.load(slots + slot) if PACKED else slot // tl.cdiv(T, L)
    begin, end, first = document_bounds(document, cu, T, L, PACKED)
    start = begin + (slot - first) * L
    return start, tl.minimum(start + L, end), document, begin, end


@Kernel
@triton.jit(do_not_specialize=["n_slots", "documents", "steps"])
def find_documents(cu, slots, n_slots, documents, steps, L: tl.constexpr, BLOCK: tl.constexpr):
    """slots[s]: the last document whose first slot is at or before s. Binary search, `steps` halvings."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + documents
    for _ in range(steps):
        middle = (low + high) // 2
        first = tl.load(cu + middle) // L + middle
        here = (first <= slot) & (middle < documents)
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    tl.store(slots + slot, low, mask=slot < n_slots)


@triton.jit
def tile(base, token, stride, row, column):
    """Pointers to a tile: rows `token + row` of what starts at `base`. Offsets within a segment fit 32 bits."""
    return base + (token + row[:, None]) * stride + column[None, :]


@triton.jit
def dot(x, y, CT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(x.to(CT), y.to(CT), input_precision=PRECISION)


@triton.jit
def transposed(x):
    """x, or each tile of a batch x, transposed, so written that Triton does not see it as such: as a right operand, a
    product's transpose lies in the right lanes already, but Triton would move one that it knows through shared memory.
    """
    R: tl.constexpr = x.shape[-2]
    N: tl.constexpr = x.shape[-1]
    if len(x.shape) == 2:
        return tl.reshape(tl.permute(tl.reshape(x, (R, 2, N // 2)), (1, 2, 0)), (N, R))
    else:
        B: tl.constexpr = x.shape[0]
        return tl.reshape(tl.permute(tl.reshape(x, (B, R, 2, N // 2)), (0, 2, 3, 1)), (B, N, R))


@triton.jit
def invert(minus_A, minus_At, row, column, LEVELS: tl.constexpr, IT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly triangular A of 2^LEVELS rows, or of each of a batch, from -A and its transpose, in
    blocks of 2, 4, ... : X <- X - X (A o M_w) X.

    The transposed inverse is carried along: a transposed product is a right operand at no cost, while a product itself
    would have to be shuffled between lanes. IT is float16 beside bfloat16 inputs: no entry of the inverse exceeds one,
    and float16 keeps as many digits as tf32.
    """
    eye = tl.where(row == column, 1.0, 0.0)
    pairs = row // 2 == column // 2
    X, Y = eye + tl.where(pairs, minus_A, 0.0), eye + tl.where(pairs, minus_At, 0.0)
    for level in tl.static_range(1, LEVELS):
        w = 2 << level
        joins = (row // w == column // w) & (row // (w // 2) != column // (w // 2))
        Xi, Yi = X.to(IT), Y.to(IT)
        XA = tl.dot(Xi, transposed(tl.where(joins, minus_At, 0.0).to(IT)), input_precision=PRECISION)
        YA = tl.dot(Yi, transposed(tl.where(joins, minus_A, 0.0).to(IT)), input_precision=PRECISION)
        X = tl.dot(XA.to(IT), transposed(Yi), X, input_precision=PRECISION)
        Y = tl.dot(YA.to(IT), transposed(Xi), Y, input_precision=PRECISION)
    return X


@triton.jit
def state_pointers(base, state, ov, ok, K: tl.constexpr, V: tl.constexpr):
    """Where the outside's state number `state`, K by V, keeps the elements of an inside one, V by K."""
    return base + state.to(tl.int64) * (K * V) + ok[None, :] * V + ov[:, None]


@triton.jit
def load_state(base, state, ov, ok, K: tl.constexpr, V: tl.constexpr, GIVEN: tl.constexpr):
    """An outside's state as V by K in float32, or zeros where none is given."""
    if GIVEN:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        return tl.load(state_pointers(base, state, ov, ok, K, V), mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros((ov.shape[0], ok.shape[0]), tl.float32)


@triton.jit
def _log_decay(a, A_log, dt_bias):
    """log alpha, not below its floor, its slope in a, and itself again; slope and copy are zero on the floor."""
    x = a + dt_bias
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * 0.25)))  # log(1 + e), whose 1 + e would round a small e away
    softplus = tl.maximum(x, 0.0) + tl.where(e < 0.02, series, tl.log(1.0 + e))
    rate = -tl.exp(A_log)
    g = rate * softplus
    free = g > FLOOR
    return tl.maximum(g, FLOOR), tl.where(free, rate * tl.sigmoid(x), 0.0), tl.where(free, g, 0.0)


@triton.jit
def _store_vectors(at, a, b, c, d, inside, VECTOR: tl.constexpr):
    """Four vectors of a tile (C by BH) whose first lies `at` these places, VECTOR from one to the next. In one store
    where they lie side by side, as lanes would else write single numbers far apart."""
    if VECTOR == 1:
        four = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], a.shape[1], 4))
        tl.store(at[:, :, None] + tl.arange(0, 4)[None, None, :], four, mask=inside[:, :, None])
    else:
        tl.store(at, a, mask=inside)
        tl.store(at + VECTOR, b, mask=inside)
        tl.store(at + 2 * VECTOR, c, mask=inside)
        tl.store(at + 3 * VECTOR, d, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["T"])
def gates(
    a, b, A_log, dt_bias, vectors, cu, slots, T, a_stride, b_stride,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, TOKEN: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Of one chunk and BH heads: G (log2), beta, and for backward g and its slope in a (both zero on the floor), four
    vectors with the strides CHUNK, TOKEN and VECTOR."""
    pid = tl.program_id(0)
    h = pid % tl.cdiv(H, BH) * BH + tl.arange(0, BH)
    part = pid // tl.cdiv(H, BH) % (L // C)
    start, stop, document, _, _ = segment_bounds(pid // (tl.cdiv(H, BH) * (L // C)), cu, slots, T, L, PACKED)
    start += part * C
    if start >= stop:
        return
    oc = tl.arange(0, C)
    inside = (start + oc < stop)[:, None] & (h < H)[None, :]
    token = start.to(tl.int64)
    a_CH = tl.load(a + token * a_stride + oc[:, None] * a_stride + h[None, :], mask=inside, other=0.0).to(tl.float32)
    b_CH = tl.load(b + token * b_stride + oc[:, None] * b_stride + h[None, :], mask=inside, other=0.0).to(tl.float32)
    A_log_H = tl.load(A_log + h, mask=h < H, other=0.0).to(tl.float32)
    dt_bias_H = tl.load(dt_bias + h, mask=h < H, other=0.0).to(tl.float32)
    g, slope, free = _log_decay(a_CH, A_log_H[None, :], dt_bias_H[None, :])
    G = tl.cumsum(tl.where(inside, g * LOG2E, 0.0), 0)
    chunk = (start // C + document).to(tl.int64) * H + h
    beta = tl.where(inside, tl.sigmoid(b_CH), 0.0)
    at = vectors + chunk[None, :] * CHUNK + oc[:, None] * TOKEN
    _store_vectors(at, G, beta, free, slope, (h < H)[None, :], VECTOR)


@Kernel
@triton.jit(do_not_specialize=["n"])
def reduce_shares(shares, dA_log, ddt_bias, n, H: tl.constexpr, BLOCK: tl.constexpr):
    """Sums n shares of every head, always in the same order. One program a head."""
    h = tl.program_id(0)
    first, second = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(0, n, BLOCK):
        share = i + tl.arange(0, BLOCK)
        where = shares + share.to(tl.int64) * H + h
        first += tl.load(where, mask=share < n, other=0.0)
        second += tl.load(where + n.to(tl.int64) * H, mask=share < n, other=0.0)
    tl.store(dA_log + h, tl.sum(first, 0).to(dA_log.dtype.element_ty))
    tl.store(ddt_bias + h, tl.sum(second, 0).to(ddt_bias.dtype.element_ty))
