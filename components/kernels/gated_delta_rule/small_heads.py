"""The gated delta rule in Triton for small heads (K, V <= 64): the kernels. README.md has the formulas and symbols.

A sequence is cut into segments, and segments into chunks of C tokens. One program is one warp with one head of one
segment; heads run fastest over the grid, so neighbours share memory lines. Forward:

    gates              every chunk: running sums of the decay, beta
    chunk_matrices     every chunk: norms, T and P, in parallel               (also what backward starts from)
    segment_summaries  every segment: S_out = S_in M + N
    scan_forward       every sequence: the state before each segment
    outputs            every segment, from the state before it

and backward the same way round: `segment_gradients` (what a segment adds to the gradient of the state before it),
`scan_backward`, `gradients`, `reduce_shares`. States are held V by K here (S is a state transposed), so that a state is
the left operand of every product with it and never leaves the registers for one.

Wider values are split: a value head is then SPLIT state heads of V values each, which share keys, queries, gates, T and
P. Gradients of what is shared are written once a state head and summed outside.

Shapes: H value heads, HS = H SPLIT state heads, K, V widths (BK, BV padded to powers of two), C chunk, L segment.
Tokens are numbered over all rows. A document that starts at token t owns the segment slots from t // L + (its number)
on, and the chunk slots likewise: distinct for all documents, without any prefix sum. Decays are in powers of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FLOOR = tl.constexpr(-80.0)
EPS = tl.constexpr(1e-6)


@triton.jit
def _segment(slot, cu, slots, T, L: tl.constexpr, PACKED: tl.constexpr):
    """The segment's [start, stop), its document's number and [begin, end). An unused slot has start > stop."""
    if PACKED:
        document = tl.load(slots + slot)
        begin = tl.load(cu + document)
        end = tl.load(cu + document + 1)
        start = begin + (slot - (begin // L + document)) * L
    else:
        per_row = tl.cdiv(T, L)
        document = slot // per_row
        begin = document * T
        end = begin + T
        start = begin + (slot - document * per_row) * L
    return start, tl.minimum(start + L, end), document, begin, end


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
def _rows(base, token, stride, row, column):
    """Pointers to a tile: rows `token + row` of what starts at `base`. Offsets within a segment fit 32 bits."""
    return base + (token + row[:, None]) * stride + column[None, :]


@triton.jit
def _dot(x, y, CT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(x.to(CT), y.to(CT), input_precision=PRECISION)


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
def _invert(minus_At, minus_A, row, column, LEVELS: tl.constexpr, IT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + At)^-1 of a strictly upper-triangular At, in blocks of 2, 4, ... : X <- X - X (At o M_w) X.

    A is At's transpose. The transposed inverse is carried along: a transposed product is a right operand at no cost,
    while a product itself would have to be shuffled between lanes. IT is float16 beside bfloat16 inputs: no entry of
    the inverse exceeds one, and float16 keeps as many digits as tf32.
    """
    eye = tl.where(row == column, 1.0, 0.0)
    pairs = row // 2 == column // 2
    X, Y = eye + tl.where(pairs, minus_At, 0.0), eye + tl.where(pairs, minus_A, 0.0)
    for level in tl.static_range(1, LEVELS):
        w = 2 << level
        joins = (row // w == column // w) & (row // (w // 2) != column // (w // 2))
        Xi, Yi = X.to(IT), Y.to(IT)
        XA = tl.dot(Xi, tl.trans(tl.where(joins, minus_A, 0.0).to(IT)), input_precision=PRECISION)
        YA = tl.dot(Yi, tl.trans(tl.where(joins, minus_At, 0.0).to(IT)), input_precision=PRECISION)
        X = tl.dot(XA.to(IT), tl.trans(Yi), X, input_precision=PRECISION)
        Y = tl.dot(YA.to(IT), tl.trans(Xi), Y, input_precision=PRECISION)
    return X


@triton.jit(do_not_specialize=["T"])
def gates(
    a,
    b,
    A_log,
    dt_bias,
    vectors,
    cu,
    slots,
    T,
    a_stride,
    b_stride,
    H: tl.constexpr,
    BH: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Of one chunk and BH heads: G (log2), beta, and for backward g and its slope in a (both zero on the floor)."""
    pid = tl.program_id(0)
    h = pid % tl.cdiv(H, BH) * BH + tl.arange(0, BH)
    part = pid // tl.cdiv(H, BH) % (L // C)
    start, stop, document, _, _ = _segment(pid // (tl.cdiv(H, BH) * (L // C)), cu, slots, T, L, PACKED)
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
    vector = vectors + chunk[None, :] * (6 * C) + oc[:, None]
    stored = (h < H)[None, :]
    tl.store(vector, G, mask=stored)
    tl.store(vector + C, tl.where(inside, tl.sigmoid(b_CH), 0.0), mask=stored)
    tl.store(vector + 4 * C, free, mask=stored)
    tl.store(vector + 5 * C, slope, mask=stored)


@triton.jit(do_not_specialize=["T"])
def chunk_matrices(
    q,
    k,
    TP,
    vectors,
    cu,
    slots,
    T,
    scale,
    q_stride,
    k_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    L: tl.constexpr,
    PER: tl.constexpr,
    PACKED: tl.constexpr,
    CT: tl.constexpr,
    IT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For PER chunks: T[j, i] = T_ij beta_j and after it P[j, i] = P_ij with the norms and the scale inside, and the
    vectors 1/|k| and scale/|q|."""
    pid = tl.program_id(0)
    h = pid % H
    part = (pid // H) % (L // (C * PER))
    start, stop, document, _, _ = _segment(pid // (H * (L // (C * PER))), cu, slots, T, L, PACKED)
    start += part * C * PER
    stop = tl.minimum(stop, start + C * PER)
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    oc, ok = tl.arange(0, C), tl.arange(0, BK)
    row, column = oc[:, None], oc[None, :]
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        vector = vectors + chunk * (6 * C) + oc
        inside = (t + oc < stop)[:, None] & (ok < K)[None, :]
        k_CK = tl.load(_rows(k, t - start, k_stride, oc, ok), mask=inside, other=0.0)
        q_CK = tl.load(_rows(q, t - start, q_stride, oc, ok), mask=inside, other=0.0)
        G, beta = tl.load(vector), tl.load(vector + C)
        kf, qf = k_CK.to(tl.float32), q_CK.to(tl.float32)
        rk = tl.rsqrt(tl.sum(kf * kf, 1) + EPS)
        rq = tl.rsqrt(tl.sum(qf * qf, 1) + EPS) * scale
        tl.store(vector + 2 * C, rk)
        tl.store(vector + 3 * C, rq)
        D = tl.exp2(-tl.abs(G[None, :] - G[:, None])) * rk[:, None]
        KK = _dot(k_CK, tl.trans(k_CK), CT, PRECISION) * D * -rk[None, :]
        minus_At = tl.where(row < column, KK * beta[None, :], 0.0)
        minus_A = tl.where(row > column, KK * beta[:, None], 0.0)
        X = _invert(minus_At, minus_A, row, column, LEVELS, IT, PRECISION)
        P = tl.where(row <= column, _dot(k_CK, tl.trans(q_CK), CT, PRECISION) * D * rq[None, :], 0.0)
        matrices = TP + chunk * (2 * C * C) + row * C + column
        tl.store(matrices, (X * beta[:, None]).to(CT))
        tl.store(matrices + C * C, P.to(CT))


@triton.jit
def _load_vectors(vectors, chunk, oc, C: tl.constexpr):
    """G, the whole chunk's decay G_C, 1/|k| and scale/|q|."""
    vector = vectors + chunk * (6 * C)
    return tl.load(vector + oc), tl.load(vector + C - 1), tl.load(vector + 2 * C + oc), tl.load(vector + 3 * C + oc)


@triton.jit
def _load_gates(vectors, chunk, oc, C: tl.constexpr):
    """g and its slope in a (both zero on the floor), and beta."""
    vector = vectors + chunk * (6 * C)
    return tl.load(vector + 4 * C + oc), tl.load(vector + 5 * C + oc), tl.load(vector + C + oc)


@triton.jit(do_not_specialize=["T"])
def segment_summaries(
    k,
    v,
    TP,
    vectors,
    N,
    M,
    cu,
    slots,
    T,
    k_stride,
    v_stride,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    CT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """N (V by K) and M (K by K) of every segment: the recurrence from zero, and with no values from the identity."""
    pid = tl.program_id(0)
    HS: tl.constexpr = H * SPLIT
    hs, slot = pid % HS, pid // HS
    h = hs // SPLIT
    start, stop, document, _, end = _segment(slot, cu, slots, T, L, PACKED)
    if stop >= end:  # nothing comes after the last segment of a document
        return
    k += start.to(tl.int64) * k_stride + h // GROUP * K
    v += start.to(tl.int64) * v_stride + hs * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    N_VK = tl.zeros((BV, BK), tl.float32)
    M_KK = tl.where(ok[:, None] == ok[None, :], 1.0, 0.0)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        k_CK = tl.load(_rows(k, t - start, k_stride, oc, ok), mask=(ok < K)[None, :], other=0.0)
        v_CV = tl.load(_rows(v, t - start, v_stride, oc, ov), mask=(ov < V)[None, :], other=0.0)
        T_CC = tl.load(TP + chunk * (2 * C * C) + oc[:, None] * C + oc[None, :])
        G, last, rk, _rq = _load_vectors(vectors, chunk, oc, C)
        before, after, gamma = (tl.exp2(G) * rk)[None, :], (tl.exp2(last - G) * rk)[None, :], tl.exp2(last)
        kt = tl.trans(k_CK)
        X = tl.trans(v_CV).to(tl.float32) - before * _dot(N_VK, kt, CT, PRECISION)
        U = _dot(X, T_CC, CT, PRECISION) * after
        N_VK = gamma * N_VK + _dot(U, k_CK, CT, PRECISION)
        U = _dot(-before * _dot(M_KK, kt, CT, PRECISION), T_CC, CT, PRECISION) * after
        M_KK = gamma * M_KK + _dot(U, k_CK, CT, PRECISION)
    where = (slot * HS + hs).to(tl.int64)
    tl.store(N + where * BV * BK + ov[:, None] * BK + ok[None, :], N_VK)
    tl.store(M + where * BK * BK + ok[:, None] * BK + ok[None, :], M_KK)


@triton.jit(do_not_specialize=["T"])
def scan_forward(
    states,
    M,
    initial,
    cu,
    T,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    INITIAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Turns N of each segment, in `states`, into the state before it. One program a document and head."""
    HS: tl.constexpr = H * SPLIT
    document, hs = tl.program_id(0) // HS, tl.program_id(0) % HS
    first, n = _first_slot(document, cu, T, L, PACKED)
    ok, ov = tl.arange(0, BK), tl.arange(0, BV)
    tile_VK, tile_KK = ov[:, None] * BK + ok[None, :], ok[:, None] * BK + ok[None, :]
    S = _load_state(initial, document, hs, ov, ok, H, SPLIT, K, V, BK, BV, INITIAL)
    for s in tl.range(0, n - 1, num_stages=STAGES):
        where = ((first + s) * HS + hs).to(tl.int64)
        N_VK = tl.load(states + where * BV * BK + tile_VK)
        M_KK = tl.load(M + where * BK * BK + tile_KK)
        tl.store(states + where * BV * BK + tile_VK, S)
        S = N_VK + tl.dot(S, M_KK, input_precision="tf32x3")
    where = ((first + n - 1) * HS + hs).to(tl.int64)
    tl.store(states + where * BV * BK + tile_VK, S)


@triton.jit
def _first_slot(document, cu, T, L: tl.constexpr, PACKED: tl.constexpr):
    """A document's first segment slot and how many it has; an empty one has one."""
    if PACKED:
        begin = tl.load(cu + document)
        n = tl.cdiv(tl.load(cu + document + 1) - begin, L)
        first = begin // L + document
    else:
        n = tl.cdiv(T, L)
        first = document * n
    return first, tl.maximum(n, 1)


@triton.jit
def _state_pointers(base, document, hs, ov, ok, H: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Where an outside state (K by all values) keeps the elements of an inside one (V of the values by K)."""
    state = base + (document * H + hs // SPLIT).to(tl.int64) * K * V * SPLIT + hs % SPLIT * V
    return state + ok[None, :] * (V * SPLIT) + ov[:, None]


@triton.jit
def _load_state(
    base,
    document,
    hs,
    ov,
    ok,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GIVEN: tl.constexpr,
):
    if GIVEN:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        return tl.load(_state_pointers(base, document, hs, ov, ok, H, SPLIT, K, V), mask=inside, other=0.0).to(
            tl.float32
        )
    else:
        return tl.zeros((BV, BK), tl.float32)


@triton.jit(do_not_specialize=["T"])
def outputs(
    q,
    k,
    v,
    TP,
    vectors,
    states,
    o,
    final,
    cu,
    slots,
    T,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    FINAL: tl.constexpr,
    CT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """o of every segment from the state before it; the last segment of a document writes the final state."""
    pid = tl.program_id(0)
    HS: tl.constexpr = H * SPLIT
    hs, slot = pid % HS, pid // HS
    h = hs // SPLIT
    start, stop, document, begin, end = _segment(slot, cu, slots, T, L, PACKED)
    if start >= stop and start != begin:
        return
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    v += first * v_stride + hs * V
    o += first * HS * V + hs * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    where = (slot * HS + hs).to(tl.int64) * BV * BK
    S = tl.load(states + where + ov[:, None] * BK + ok[None, :])
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        k_CK = tl.load(_rows(k, t - start, k_stride, oc, ok), mask=here & (ok < K)[None, :], other=0.0)
        q_CK = tl.load(_rows(q, t - start, q_stride, oc, ok), mask=here & (ok < K)[None, :], other=0.0)
        v_CV = tl.load(_rows(v, t - start, v_stride, oc, ov), mask=here & (ov < V)[None, :], other=0.0)
        matrices = TP + chunk * (2 * C * C) + oc[:, None] * C + oc[None, :]
        T_CC, P_CC = tl.load(matrices), tl.load(matrices + C * C)
        G, last, rk, rq = _load_vectors(vectors, chunk, oc, C)
        E = tl.exp2(G)
        X = tl.trans(v_CV).to(tl.float32) - (E * rk)[None, :] * _dot(S, tl.trans(k_CK), CT, PRECISION)
        U = _dot(X, T_CC, CT, PRECISION)
        o_VC = (E * rq)[None, :] * _dot(S, tl.trans(q_CK), CT, PRECISION) + _dot(U, P_CC, CT, PRECISION)
        S = tl.exp2(last) * S + _dot(U * (tl.exp2(last - G) * rk)[None, :], k_CK, CT, PRECISION)
        o_CV = tl.trans(o_VC.to(o.dtype.element_ty))
        tl.store(_rows(o, t - start, HS * V, oc, ov), o_CV, mask=here & (ov < V)[None, :])
    if FINAL and stop == end:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(_state_pointers(final, document, hs, ov, ok, H, SPLIT, K, V), S, mask=inside)


@triton.jit
def _through_chunk(
    dS, do_CV, q_CK, k_CK, T_CC, P_CC, before, query, after, gamma, CT: tl.constexpr, PRECISION: tl.constexpr
):
    """dX (V by C), and the gradient of the state before the chunk from that of the state after it."""
    dU = _dot(tl.trans(do_CV), tl.trans(P_CC), CT, PRECISION) + after * _dot(dS, tl.trans(k_CK), CT, PRECISION)
    dX = _dot(dU, tl.trans(T_CC), CT, PRECISION)
    dS = gamma * dS + _dot(tl.trans(do_CV).to(tl.float32) * query, q_CK, CT, PRECISION)
    return dX, dS + _dot(dX * -before, k_CK, CT, PRECISION)


@triton.jit(do_not_specialize=["T"])
def segment_gradients(
    q,
    k,
    do,
    TP,
    vectors,
    R,
    dfinal,
    cu,
    slots,
    T,
    q_stride,
    k_stride,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    FINAL: tl.constexpr,
    CT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """R of every segment: the gradient of the state before it when that of the state after it is zero (or, for the
    last segment of a document, `dfinal`)."""
    pid = tl.program_id(0)
    HS: tl.constexpr = H * SPLIT
    hs, slot = pid % HS, pid // HS
    h = hs // SPLIT
    start, stop, document, begin, end = _segment(slot, cu, slots, T, L, PACKED)
    if (start == begin) | (start >= stop):  # nothing comes before the first segment
        return
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    do += first * HS * V + hs * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    if stop == end:
        dS = _load_state(dfinal, document, hs, ov, ok, H, SPLIT, K, V, BK, BV, FINAL)
    else:
        dS = tl.zeros((BV, BK), tl.float32)
    n = tl.cdiv(stop - start, C)
    for i in tl.range(0, n, num_stages=STAGES):
        t = start + (n - 1 - i) * C
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        k_CK = tl.load(_rows(k, t - start, k_stride, oc, ok), mask=here & (ok < K)[None, :], other=0.0)
        q_CK = tl.load(_rows(q, t - start, q_stride, oc, ok), mask=here & (ok < K)[None, :], other=0.0)
        do_CV = tl.load(_rows(do, t - start, HS * V, oc, ov), mask=here & (ov < V)[None, :], other=0.0)
        matrices = TP + chunk * (2 * C * C) + oc[:, None] * C + oc[None, :]
        T_CC, P_CC = tl.load(matrices), tl.load(matrices + C * C)
        G, last, rk, rq = _load_vectors(vectors, chunk, oc, C)
        E = tl.exp2(G)
        before, query, after = (E * rk)[None, :], (E * rq)[None, :], (tl.exp2(last - G) * rk)[None, :]
        gamma = tl.exp2(last)
        _dX, dS = _through_chunk(dS, do_CV, q_CK, k_CK, T_CC, P_CC, before, query, after, gamma, CT, PRECISION)
    tl.store(R + (slot * HS + hs).to(tl.int64) * BV * BK + ov[:, None] * BK + ok[None, :], dS)


@triton.jit(do_not_specialize=["T"])
def scan_backward(
    R,
    M,
    dfinal,
    cu,
    T,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    FINAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Turns R of each segment into the gradient of the state after it. One program a document and head.

    R of the last segment already contains `dfinal`: that segment has no M, as nothing comes after it.
    """
    HS: tl.constexpr = H * SPLIT
    document, hs = tl.program_id(0) // HS, tl.program_id(0) % HS
    first, n = _first_slot(document, cu, T, L, PACKED)
    ok, ov = tl.arange(0, BK), tl.arange(0, BV)
    tile_VK = ov[:, None] * BK + ok[None, :]
    dS = _load_state(dfinal, document, hs, ov, ok, H, SPLIT, K, V, BK, BV, FINAL)
    if n > 1:
        where = ((first + n - 1) * HS + hs).to(tl.int64)
        R_VK = tl.load(R + where * BV * BK + tile_VK)
        tl.store(R + where * BV * BK + tile_VK, dS)
        dS = R_VK
    for i in tl.range(2, n, num_stages=STAGES):
        where = ((first + n - i) * HS + hs).to(tl.int64)
        R_VK = tl.load(R + where * BV * BK + tile_VK)
        Mt = tl.load(M + where * BK * BK + ok[None, :] * BK + ok[:, None])
        tl.store(R + where * BV * BK + tile_VK, dS)
        dS = R_VK + tl.dot(dS, Mt, input_precision="tf32x3")
    tl.store(R + (first * HS + hs).to(tl.int64) * BV * BK + tile_VK, dS)


@triton.jit(do_not_specialize=["T", "n_slots"])
def gradients(
    q,
    k,
    v,
    do,
    do_again,
    TP,
    TP_again,
    vectors,
    states,
    R,
    scratch,
    q_dot,
    dq,
    dk,
    dv,
    da,
    db,
    shares,
    dinitial,
    cu,
    slots,
    T,
    scale,
    q_stride,
    k_stride,
    v_stride,
    n_slots,
    H: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    INITIAL: tl.constexpr,
    CT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    BACK_STAGES: tl.constexpr,
):
    """Every gradient of one segment: forward over its chunks for dq, leaving each chunk's state, X and the products
    q . dq in scratch that stays in the cache, then back for all others.

    dq and dk are per value head (summed over groups outside); shares holds each segment's share of dA_log and ddt_bias.
    """
    pid = tl.program_id(0)
    HS: tl.constexpr = H * SPLIT
    hs, slot = pid % HS, pid // HS
    h = hs // SPLIT
    start, stop, document, begin, _ = _segment(slot, cu, slots, T, L, PACKED)
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    row, column = oc[:, None], oc[None, :]
    tile_VK, tile_VC, tile_CC = ov[:, None] * BK + ok[None, :], ov[:, None] * C + column, row * C + column
    inside_K, inside_V = (ok < K)[None, :], (ov < V)[None, :]
    segment = (slot * HS + hs).to(tl.int64)
    if start >= stop and start != begin:
        tl.store(shares + segment, 0.0)
        tl.store(shares + n_slots * HS + segment, 0.0)
        return
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    v += first * v_stride + hs * V
    do += first * HS * V + hs * V
    do_again += first * HS * V + hs * V
    dq += first * HS * K + hs * K
    dk += first * HS * K + hs * K
    dv += first * HS * V + hs * V
    da += first * HS + hs
    db += first * HS + hs

    S = tl.load(states + segment * BV * BK + tile_VK)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        own = chunk * SPLIT + hs % SPLIT
        here = (t + oc < stop)[:, None]
        k_CK = tl.load(_rows(k, t - start, k_stride, oc, ok), mask=here & inside_K, other=0.0)
        v_CV = tl.load(_rows(v, t - start, v_stride, oc, ov), mask=here & inside_V, other=0.0)
        q_CK = tl.load(_rows(q, t - start, q_stride, oc, ok), mask=here & inside_K, other=0.0)
        do_CV = tl.load(_rows(do, t - start, HS * V, oc, ov), mask=here & inside_V, other=0.0)
        matrices = TP + chunk * (2 * C * C) + tile_CC
        T_CC, P_CC = tl.load(matrices), tl.load(matrices + C * C)
        T_again_CC = tl.load(TP_again + chunk * (2 * C * C) + tile_CC)
        G, last, rk, rq = _load_vectors(vectors, chunk, oc, C)
        E = tl.exp2(G)
        Sc = S.to(CT)
        X = (tl.trans(v_CV).to(tl.float32) - (E * rk)[None, :] * _dot(Sc, tl.trans(k_CK), CT, PRECISION)).to(CT)
        tl.store(scratch + own * (BV * (BK + C)) + tile_VK, Sc)
        tl.store(scratch + own * (BV * (BK + C)) + BV * BK + tile_VC, X)
        after = (tl.exp2(last - G) * rk)[None, :]
        S = tl.exp2(last) * S + _dot(_dot(X, T_CC, CT, PRECISION) * after, k_CK, CT, PRECISION)

        U = _dot(tl.trans(T_again_CC), tl.trans(X), CT, PRECISION).to(CT)
        Z = _dot(do_CV, tl.trans(U), CT, PRECISION)
        D = tl.exp2(tl.where(row >= column, G[:, None] - G[None, :], -float("inf")))
        qf = q_CK.to(tl.float32)
        dq_n = _dot(do_CV, Sc, CT, PRECISION) * E[:, None]
        dot = tl.sum(qf * dq_n, 1) * rq + tl.sum(Z * tl.trans(P_CC).to(tl.float32), 1)
        dq_n += _dot(Z * D * rk[None, :], k_CK, CT, PRECISION)
        dq_CK = dq_n * rq[:, None] - qf * (dot * rq * rq / (scale * scale))[:, None]
        tl.store(_rows(dq, t - start, HS * K, oc, ok), dq_CK.to(dq.dtype.element_ty), mask=here & inside_K)
        tl.store(q_dot + own * C + oc, dot)
    tl.debug_barrier()  # other lanes read the scratch back

    dA_log_C, ddt_bias_C = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    dS = tl.load(R + segment * BV * BK + tile_VK)
    n = tl.cdiv(stop - start, C)
    for i in tl.range(0, n, num_stages=BACK_STAGES):
        t = start + (n - 1 - i) * C
        chunk = (t // C + document).to(tl.int64) * H + h
        own = chunk * SPLIT + hs % SPLIT
        here = t + oc < stop
        k_CK = tl.load(_rows(k, t - start, k_stride, oc, ok), mask=here[:, None] & inside_K, other=0.0)
        q_CK = tl.load(_rows(q, t - start, q_stride, oc, ok), mask=here[:, None] & inside_K, other=0.0)
        do_CV = tl.load(_rows(do, t - start, HS * V, oc, ov), mask=here[:, None] & inside_V, other=0.0)
        do_again_CV = tl.load(_rows(do_again, t - start, HS * V, oc, ov), mask=here[:, None] & inside_V, other=0.0)
        matrices = TP + chunk * (2 * C * C) + tile_CC
        T_CC, P_CC = tl.load(matrices), tl.load(matrices + C * C)
        T_again_CC = tl.load(TP_again + chunk * (2 * C * C) + tile_CC)
        S_VK = tl.load(scratch + own * (BV * (BK + C)) + tile_VK)
        X_CV = tl.trans(tl.load(scratch + own * (BV * (BK + C)) + BV * BK + tile_VC))
        dG = tl.load(q_dot + own * C + oc)
        G, last, rk, rq = _load_vectors(vectors, chunk, oc, C)
        g, g_slope, beta = _load_gates(vectors, chunk, oc, C)
        E, d, gamma = tl.exp2(G), tl.exp2(last - G), tl.exp2(last)

        U = _dot(tl.trans(T_again_CC), X_CV, CT, PRECISION).to(CT)
        U_dS = _dot(U, dS, CT, PRECISION)
        last_dG = gamma * tl.sum(S_VK.to(tl.float32) * dS)
        before, query, after = (E * rk)[None, :], (E * rq)[None, :], (d * rk)[None, :]
        dX_VC, dS = _through_chunk(dS, do_CV, q_CK, k_CK, T_CC, P_CC, before, query, after, gamma, CT, PRECISION)
        dX_CV = tl.trans(dX_VC.to(CT))
        tl.store(_rows(dv, t - start, HS * V, oc, ov), dX_CV, mask=here[:, None] & inside_V)

        Y, Yt = _dot(dX_CV, tl.trans(U), CT, PRECISION), _dot(U, tl.trans(dX_CV), CT, PRECISION)
        D = tl.exp2(-tl.abs(G[:, None] - G[None, :]))
        Y = tl.where(row > column, Y, tl.where(row < column, Yt, 0.0)) * (D * -rk[None, :])
        H_A = Y * (_dot(k_CK, tl.trans(k_CK), CT, PRECISION) * rk[:, None])
        below, whole = tl.sum(tl.where(row > column, H_A, 0.0), 1), tl.sum(H_A, 1)
        beta_dbeta = below + tl.sum(dX_CV.to(tl.float32) * X_CV.to(tl.float32), 1)

        kf = k_CK.to(tl.float32)
        dk_n = _dot(dX_CV, S_VK, CT, PRECISION) * -E[:, None]
        dot, u = tl.sum(kf * dk_n, 1) * rk, tl.sum(kf * U_dS, 1) * (d * rk)
        Zt = _dot(U, tl.trans(do_again_CV), CT, PRECISION)
        P_sum = tl.sum(Zt * P_CC.to(tl.float32), 1)
        dG += 2 * below - whole - P_sum + dot - u
        dk_n += U_dS * d[:, None] + _dot(Y, k_CK, CT, PRECISION)
        dk_n += _dot(tl.where(row <= column, Zt * (D * rq[None, :]), 0.0), q_CK, CT, PRECISION)
        dk_CK = dk_n * rk[:, None] - kf * ((dot + u + P_sum + whole) * rk * rk)[:, None]
        tl.store(_rows(dk, t - start, HS * K, oc, ok), dk_CK.to(dk.dtype.element_ty), mask=here[:, None] & inside_K)

        dg = tl.cumsum(dG, 0, reverse=True) + (last_dG + tl.sum(u, 0))
        da_C = dg * g_slope
        tl.store(da + (t - start + oc) * HS, da_C.to(da.dtype.element_ty), mask=here)
        tl.store(db + (t - start + oc) * HS, ((1.0 - beta) * beta_dbeta).to(db.dtype.element_ty), mask=here)
        dA_log_C += tl.where(here, dg * g, 0.0)
        ddt_bias_C += tl.where(here, da_C, 0.0)
    tl.store(shares + segment, tl.sum(dA_log_C, 0))
    tl.store(shares + n_slots * HS + segment, tl.sum(ddt_bias_C, 0))
    if INITIAL and start == begin:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(_state_pointers(dinitial, document, hs, ov, ok, H, SPLIT, K, V), dS, mask=inside)


@triton.jit(do_not_specialize=["n_slots"])
def reduce_shares(shares, dA_log, ddt_bias, n_slots, H: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the segments' shares, always in the same order. One program a head."""
    h = tl.program_id(0)
    first, second = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(0, n_slots * SPLIT, BLOCK):
        share = i + tl.arange(0, BLOCK)
        inside = share < n_slots * SPLIT
        where = shares + share // SPLIT * (H * SPLIT) + h * SPLIT + share % SPLIT
        first += tl.load(where, mask=inside, other=0.0)
        second += tl.load(where + n_slots * H * SPLIT, mask=inside, other=0.0)
    tl.store(dA_log + h, tl.sum(first, 0).to(dA_log.dtype.element_ty))
    tl.store(ddt_bias + h, tl.sum(second, 0).to(ddt_bias.dtype.element_ty))
