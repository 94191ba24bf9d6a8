"""The gated delta rule in Triton for small heads (K, V <= 32): the kernels. README.md has the formulas and symbols.

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

Shapes: H value heads, K, V widths (BK, BV padded to powers of two), C chunk, L segment. Slots as in tiles.py.
"""

import triton
import triton.language as tl

from components.kernels.gated_delta_rule.tiles import (
    EPS,
    chunk_gates,
    chunk_vectors,
    document_bounds,
    dot,
    load_state,
    segment_bounds,
    state_pointers,
    tile,
)
from components.kernels.launcher import Kernel


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


@Kernel
@triton.jit(do_not_specialize=["T"])
def chunk_matrices(
    q, k, TP, vectors, cu, slots, T, scale, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    L: tl.constexpr, PER: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, IT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For PER chunks: T[j, i] = T_ij beta_j and after it P[j, i] = P_ij with the norms and the scale inside, and the
    vectors 1/|k| and scale/|q|."""
    pid = tl.program_id(0)
    h = pid % H
    part = (pid // H) % (L // (C * PER))
    start, stop, document, _, _ = segment_bounds(pid // (H * (L // (C * PER))), cu, slots, T, L, PACKED)
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
        k_CK = tl.load(tile(k, t - start, k_stride, oc, ok), mask=inside, other=0.0)
        q_CK = tl.load(tile(q, t - start, q_stride, oc, ok), mask=inside, other=0.0)
        G, beta = tl.load(vector), tl.load(vector + C)
        kf, qf = k_CK.to(tl.float32), q_CK.to(tl.float32)
        rk = tl.rsqrt(tl.sum(kf * kf, 1) + EPS)
        rq = tl.rsqrt(tl.sum(qf * qf, 1) + EPS) * scale
        tl.store(vector + 2 * C, rk)
        tl.store(vector + 3 * C, rq)
        D = tl.exp2(-tl.abs(G[None, :] - G[:, None])) * rk[:, None]
        KK = dot(k_CK, tl.trans(k_CK), CT, PRECISION) * D * -rk[None, :]
        minus_At = tl.where(row < column, KK * beta[None, :], 0.0)
        minus_A = tl.where(row > column, KK * beta[:, None], 0.0)
        X = _invert(minus_At, minus_A, row, column, LEVELS, IT, PRECISION)
        P = tl.where(row <= column, dot(k_CK, tl.trans(q_CK), CT, PRECISION) * D * rq[None, :], 0.0)
        matrices = TP + chunk * (2 * C * C) + row * C + column
        tl.store(matrices, (X * beta[:, None]).to(CT))
        tl.store(matrices + C * C, P.to(CT))


@Kernel
@triton.jit(do_not_specialize=["T"])
def segment_summaries(
    k, v, TP, vectors, N, M, cu, slots, T, k_stride, v_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """N (V by K) and M (K by K) of every segment that another follows: the recurrence from zero, and with no values
    from the identity."""
    pid = tl.program_id(0)
    h, slot = pid % H, pid // H
    start, stop, document, _, end = segment_bounds(slot, cu, slots, T, L, PACKED)
    if stop >= end:  # nothing comes after the last segment of a document
        return
    k += start.to(tl.int64) * k_stride + h // GROUP * K
    v += start.to(tl.int64) * v_stride + h * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    N_VK = tl.zeros((BV, BK), tl.float32)
    M_KK = tl.where(ok[:, None] == ok[None, :], 1.0, 0.0)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        k_CK = tl.load(tile(k, t - start, k_stride, oc, ok), mask=(ok < K)[None, :], other=0.0)
        v_CV = tl.load(tile(v, t - start, v_stride, oc, ov), mask=(ov < V)[None, :], other=0.0)
        T_CC = tl.load(TP + chunk * (2 * C * C) + oc[:, None] * C + oc[None, :])
        G, last, rk, _rq = chunk_vectors(vectors, chunk, oc, C)
        before, after, gamma = (tl.exp2(G) * rk)[None, :], (tl.exp2(last - G) * rk)[None, :], tl.exp2(last)
        kt = tl.trans(k_CK)
        X = tl.trans(v_CV).to(tl.float32) - before * dot(N_VK, kt, CT, PRECISION)
        U = dot(X, T_CC, CT, PRECISION) * after
        N_VK = gamma * N_VK + dot(U, k_CK, CT, PRECISION)
        U = dot(-before * dot(M_KK, kt, CT, PRECISION), T_CC, CT, PRECISION) * after
        M_KK = gamma * M_KK + dot(U, k_CK, CT, PRECISION)
    where = (start // L * H + h).to(tl.int64)
    tl.store(N + where * BV * BK + ov[:, None] * BK + ok[None, :], N_VK)
    tl.store(M + where * BK * BK + ok[:, None] * BK + ok[None, :], M_KK)


@Kernel
@triton.jit(do_not_specialize=["T"])
def scan_forward(
    states, M, initial, cu, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Turns N of each segment, in `states`, into the state after it. One program a document and head."""
    document, h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, end, _ = document_bounds(document, cu, T, L, PACKED)
    ok, ov = tl.arange(0, BK), tl.arange(0, BV)
    tile_VK, tile_KK = ov[:, None] * BK + ok[None, :], ok[:, None] * BK + ok[None, :]
    S = load_state(initial, document * H + h, ov, ok, K, V, INITIAL)
    for i in tl.range(0, tl.cdiv(end - begin, L) - 1, num_stages=STAGES):
        where = ((begin // L + i) * H + h).to(tl.int64)
        N_VK = tl.load(states + where * BV * BK + tile_VK)
        M_KK = tl.load(M + where * BK * BK + tile_KK)
        S = N_VK + tl.dot(S, M_KK, input_precision="tf32x3")
        tl.store(states + where * BV * BK + tile_VK, S)


@triton.jit
def _load_chunk(q, k, TP, chunk, token, q_stride, k_stride, here, oc, ok, K: tl.constexpr, C: tl.constexpr):
    """A chunk's queries and keys (C by K), raw, and its T and P."""
    inside = here & (ok < K)[None, :]
    k_CK = tl.load(tile(k, token, k_stride, oc, ok), mask=inside, other=0.0)
    q_CK = tl.load(tile(q, token, q_stride, oc, ok), mask=inside, other=0.0)
    matrices = TP + chunk * (2 * C * C) + oc[:, None] * C + oc[None, :]
    return q_CK, k_CK, tl.load(matrices), tl.load(matrices + C * C)


@triton.jit
def _carried(states, t, h, ov, ok, H: tl.constexpr, L: tl.constexpr):
    """Where the state lies that crosses token t, at which a segment other than its document's first begins."""
    BV: tl.constexpr = ov.shape[0]
    BK: tl.constexpr = ok.shape[0]
    return states + ((t // L - 1) * H + h).to(tl.int64) * BV * BK + ov[:, None] * BK + ok[None, :]


@triton.jit
def _state_before(
    start, begin, states, initial, document, h, ov, ok,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """The state before the segment that starts at `start`."""
    if start == begin:
        S = load_state(initial, document * H + h, ov, ok, K, V, INITIAL)
    else:
        S = tl.load(_carried(states, start, h, ov, ok, H, L))
    return S


@Kernel
@triton.jit(do_not_specialize=["T"])
def outputs(
    q, k, v, TP, vectors, states, initial, o, final, cu, slots, T, q_stride, k_stride, v_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    CT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o of every segment from the state before it; the last segment of a document writes the final state."""
    pid = tl.program_id(0)
    h, slot = pid % H, pid // H
    start, stop, document, begin, end = segment_bounds(slot, cu, slots, T, L, PACKED)
    if start >= stop and start != begin:
        return
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    v += first * v_stride + h * V
    o += first * H * V + h * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    S = _state_before(start, begin, states, initial, document, h, ov, ok, H, K, V, L, INITIAL)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        q_CK, k_CK, T_CC, P_CC = _load_chunk(q, k, TP, chunk, t - start, q_stride, k_stride, here, oc, ok, K, C)
        v_CV = tl.load(tile(v, t - start, v_stride, oc, ov), mask=here & (ov < V)[None, :], other=0.0)
        G, last, rk, rq = chunk_vectors(vectors, chunk, oc, C)
        E = tl.exp2(G)
        X = tl.trans(v_CV).to(tl.float32) - (E * rk)[None, :] * dot(S, tl.trans(k_CK), CT, PRECISION)
        U = dot(X, T_CC, CT, PRECISION)
        o_VC = (E * rq)[None, :] * dot(S, tl.trans(q_CK), CT, PRECISION) + dot(U, P_CC, CT, PRECISION)
        S = tl.exp2(last) * S + dot(U * (tl.exp2(last - G) * rk)[None, :], k_CK, CT, PRECISION)
        o_CV = tl.trans(o_VC.to(o.dtype.element_ty))
        tl.store(tile(o, t - start, H * V, oc, ov), o_CV, mask=here & (ov < V)[None, :])
    if FINAL and stop == end:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(state_pointers(final, document * H + h, ov, ok, K, V), S, mask=inside)


@triton.jit
def _through_chunk(
    dS, do_CV, q_CK, k_CK, T_CC, P_CC, before, query, after, gamma,
    CT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX (V by C), and the gradient of the state before the chunk from that of the state after it."""
    dU = dot(tl.trans(do_CV), tl.trans(P_CC), CT, PRECISION) + after * dot(dS, tl.trans(k_CK), CT, PRECISION)
    dX = dot(dU, tl.trans(T_CC), CT, PRECISION)
    dS = gamma * dS + dot(tl.trans(do_CV).to(tl.float32) * query, q_CK, CT, PRECISION)
    return dX, dS + dot(dX * -before, k_CK, CT, PRECISION)


@Kernel
@triton.jit(do_not_specialize=["T"])
def segment_gradients(
    q, k, do, TP, vectors, R, dfinal, cu, slots, T, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, CT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """R of every segment: the gradient of the state before it when that of the state after it is zero (or, for the
    last segment of a document, `dfinal`)."""
    pid = tl.program_id(0)
    h, slot = pid % H, pid // H
    start, stop, document, begin, end = segment_bounds(slot, cu, slots, T, L, PACKED)
    if (start == begin) | (start >= stop):  # nothing comes before the first segment
        return
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    do += first * H * V + h * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    if stop == end:  # noqa: SIM108
        dS = load_state(dfinal, document * H + h, ov, ok, K, V, FINAL)
    else:
        dS = tl.zeros((BV, BK), tl.float32)
    n = tl.cdiv(stop - start, C)
    for i in tl.range(0, n, num_stages=STAGES):
        t = start + (n - 1 - i) * C
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        q_CK, k_CK, T_CC, P_CC = _load_chunk(q, k, TP, chunk, t - start, q_stride, k_stride, here, oc, ok, K, C)
        do_CV = tl.load(tile(do, t - start, H * V, oc, ov), mask=here & (ov < V)[None, :], other=0.0)
        G, last, rk, rq = chunk_vectors(vectors, chunk, oc, C)
        E = tl.exp2(G)
        before, query, after = (E * rk)[None, :], (E * rq)[None, :], (tl.exp2(last - G) * rk)[None, :]
        gamma = tl.exp2(last)
        _dX, dS = _through_chunk(dS, do_CV, q_CK, k_CK, T_CC, P_CC, before, query, after, gamma, CT, PRECISION)
    tl.store(_carried(R, start, h, ov, ok, H, L), dS)


@Kernel
@triton.jit(do_not_specialize=["T"])
def scan_backward(
    R,
    M,
    cu,
    T,
    H: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Turns R of each segment into the gradient of the state before it. One program a document and head. R of the last
    segment is that already, as nothing comes after it."""
    document, h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, end, _ = document_bounds(document, cu, T, L, PACKED)
    n = tl.cdiv(end - begin, L)
    ok, ov = tl.arange(0, BK), tl.arange(0, BV)
    tile_VK, tile_KK = ov[:, None] * BK + ok[None, :], ok[None, :] * BK + ok[:, None]
    where = ((begin // L + n - 2) * H + h).to(tl.int64)
    dS = tl.load(R + where * BV * BK + tile_VK, mask=n > 2, other=0.0)
    for i in tl.range(3, n + 1, num_stages=STAGES):
        where = ((begin // L + n - i) * H + h).to(tl.int64)
        R_VK = tl.load(R + where * BV * BK + tile_VK)
        Mt = tl.load(M + (where + H) * BK * BK + tile_KK)
        dS = R_VK + tl.dot(dS, Mt, input_precision="tf32x3")
        tl.store(R + where * BV * BK + tile_VK, dS)


@triton.jit
def _query_gradients(
    S, q_CK, k_CK, v_CV, do_CV, T_CC, P_CC, T_again_CC, G, last, rk, rq, row, column, scale,
    CT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk on the way forward, from the state before it: dq (C by K), q . dq, X (V by C), and the state after it."""
    E, Sc = tl.exp2(G), S.to(CT)
    X = (tl.trans(v_CV).to(tl.float32) - (E * rk)[None, :] * dot(Sc, tl.trans(k_CK), CT, PRECISION)).to(CT)
    after = (tl.exp2(last - G) * rk)[None, :]
    S = tl.exp2(last) * S + dot(dot(X, T_CC, CT, PRECISION) * after, k_CK, CT, PRECISION)
    U = dot(tl.trans(T_again_CC), tl.trans(X), CT, PRECISION).to(CT)
    Z = dot(do_CV, tl.trans(U), CT, PRECISION)
    D = tl.exp2(tl.where(row >= column, G[:, None] - G[None, :], -float("inf")))
    qf = q_CK.to(tl.float32)
    dq = dot(do_CV, Sc, CT, PRECISION) * E[:, None]
    q_dq = tl.sum(qf * dq, 1) * rq + tl.sum(Z * tl.trans(P_CC).to(tl.float32), 1)
    dq += dot(Z * D * rk[None, :], k_CK, CT, PRECISION)
    return dq * rq[:, None] - qf * (q_dq * rq * rq / (scale * scale))[:, None], q_dq, X, S


@triton.jit
def _key_gradients(
    S_VK, dX_CV, X_CV, U, U_dS, q_CK, k_CK, do_CV, P_CC, G, last, rk, rq, row, column,
    CT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk, from the state before it, dX, X, U and U dS': dk (C by K), beta dbeta, what dG takes beside q . dq,
    and what all of the chunk's dg take."""
    E, d = tl.exp2(G), tl.exp2(last - G)
    Y, Yt = dot(dX_CV, tl.trans(U), CT, PRECISION), dot(U, tl.trans(dX_CV), CT, PRECISION)
    D = tl.exp2(-tl.abs(G[:, None] - G[None, :]))
    Y = tl.where(row > column, Y, tl.where(row < column, Yt, 0.0)) * (D * -rk[None, :])
    dA_A = Y * (dot(k_CK, tl.trans(k_CK), CT, PRECISION) * rk[:, None])
    below, whole = tl.sum(tl.where(row > column, dA_A, 0.0), 1), tl.sum(dA_A, 1)
    beta_dbeta = below + tl.sum(dX_CV.to(tl.float32) * X_CV.to(tl.float32), 1)
    kf = k_CK.to(tl.float32)
    dk = dot(dX_CV, S_VK, CT, PRECISION) * -E[:, None]
    k_dk, u = tl.sum(kf * dk, 1) * rk, tl.sum(kf * U_dS, 1) * (d * rk)
    Zt = dot(U, tl.trans(do_CV), CT, PRECISION)
    P_sum = tl.sum(Zt * P_CC.to(tl.float32), 1)
    dk += U_dS * d[:, None] + dot(Y, k_CK, CT, PRECISION)
    dk += dot(tl.where(row <= column, Zt * (D * rq[None, :]), 0.0), q_CK, CT, PRECISION)
    dk = dk * rk[:, None] - kf * ((k_dk + u + P_sum + whole) * rk * rk)[:, None]
    return dk, beta_dbeta, 2 * below - whole - P_sum + k_dk - u, tl.sum(u, 0)


@Kernel
@triton.jit(do_not_specialize=["T", "n_slots"])
def gradients(
    q, k, v, do, do_again, TP, TP_again, vectors, states, initial, R, dfinal, scratch, q_dot, dq, dk, dv, da, db,
    shares, dinitial, cu, slots, T, scale, q_stride, k_stride, v_stride, n_slots,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    CT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, BACK_STAGES: tl.constexpr,
):  # fmt: skip
    """Every gradient of one segment: forward over its chunks for dq, leaving each chunk's state, X and the products
    q . dq in scratch that stays in the cache, then back for all others.

    dq and dk are per value head (summed over groups outside); shares holds each segment's share of dA_log and ddt_bias.
    """
    pid = tl.program_id(0)
    h, slot = pid % H, pid // H
    start, stop, document, begin, end = segment_bounds(slot, cu, slots, T, L, PACKED)
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    row, column = oc[:, None], oc[None, :]
    tile_VK, tile_VC, tile_CC = ov[:, None] * BK + ok[None, :], ov[:, None] * C + column, row * C + column
    inside_K, inside_V = (ok < K)[None, :], (ov < V)[None, :]
    segment = (slot * H + h).to(tl.int64)
    if start >= stop and start != begin:
        tl.store(shares + segment, 0.0)
        tl.store(shares + n_slots * H + segment, 0.0)
        return
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    v += first * v_stride + h * V
    do += first * H * V + h * V
    do_again += first * H * V + h * V
    dq += first * H * K + h * K
    dk += first * H * K + h * K
    dv += first * H * V + h * V
    da += first * H + h
    db += first * H + h

    S = _state_before(start, begin, states, initial, document, h, ov, ok, H, K, V, L, INITIAL)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        q_CK, k_CK, T_CC, P_CC = _load_chunk(q, k, TP, chunk, t - start, q_stride, k_stride, here, oc, ok, K, C)
        v_CV = tl.load(tile(v, t - start, v_stride, oc, ov), mask=here & inside_V, other=0.0)
        do_CV = tl.load(tile(do, t - start, H * V, oc, ov), mask=here & inside_V, other=0.0)
        T_again_CC = tl.load(TP_again + chunk * (2 * C * C) + tile_CC)
        G, last, rk, rq = chunk_vectors(vectors, chunk, oc, C)
        tl.store(scratch + chunk * (BV * (BK + C)) + tile_VK, S.to(CT))
        dq_CK, q_dq, X, S = _query_gradients(
            S, q_CK, k_CK, v_CV, do_CV, T_CC, P_CC, T_again_CC, G, last, rk, rq, row, column, scale, CT, PRECISION
        )
        tl.store(scratch + chunk * (BV * (BK + C)) + BV * BK + tile_VC, X)
        tl.store(tile(dq, t - start, H * K, oc, ok), dq_CK.to(dq.dtype.element_ty), mask=here & inside_K)
        tl.store(q_dot + chunk * C + oc, q_dq)
    tl.debug_barrier()  # other lanes read the scratch back

    dA_log_C, ddt_bias_C = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    if stop == end:
        dS = load_state(dfinal, document * H + h, ov, ok, K, V, FINAL)
    else:
        dS = tl.load(_carried(R, start + L, h, ov, ok, H, L))
    n = tl.cdiv(stop - start, C)
    for i in tl.range(0, n, num_stages=BACK_STAGES):
        t = start + (n - 1 - i) * C
        chunk = (t // C + document).to(tl.int64) * H + h
        here = t + oc < stop
        q_CK, k_CK, T_CC, P_CC = _load_chunk(
            q, k, TP, chunk, t - start, q_stride, k_stride, here[:, None], oc, ok, K, C
        )
        do_CV = tl.load(tile(do, t - start, H * V, oc, ov), mask=here[:, None] & inside_V, other=0.0)
        do_again_CV = tl.load(tile(do_again, t - start, H * V, oc, ov), mask=here[:, None] & inside_V, other=0.0)
        T_again_CC = tl.load(TP_again + chunk * (2 * C * C) + tile_CC)
        S_VK = tl.load(scratch + chunk * (BV * (BK + C)) + tile_VK)
        X_CV = tl.trans(tl.load(scratch + chunk * (BV * (BK + C)) + BV * BK + tile_VC))
        q_dq = tl.load(q_dot + chunk * C + oc)
        G, last, rk, rq = chunk_vectors(vectors, chunk, oc, C)
        g, g_slope, beta = chunk_gates(vectors, chunk, oc, C)
        E, d, gamma = tl.exp2(G), tl.exp2(last - G), tl.exp2(last)

        U = dot(tl.trans(T_again_CC), X_CV, CT, PRECISION).to(CT)
        U_dS = dot(U, dS, CT, PRECISION)
        last_dG = gamma * tl.sum(S_VK.to(tl.float32) * dS)
        before, query, after = (E * rk)[None, :], (E * rq)[None, :], (d * rk)[None, :]
        dX_VC, dS = _through_chunk(dS, do_CV, q_CK, k_CK, T_CC, P_CC, before, query, after, gamma, CT, PRECISION)
        dX_CV = tl.trans(dX_VC.to(CT))
        tl.store(tile(dv, t - start, H * V, oc, ov), dX_CV, mask=here[:, None] & inside_V)

        dk_CK, beta_dbeta, dG, u = _key_gradients(
            S_VK, dX_CV, X_CV, U, U_dS, q_CK, k_CK, do_again_CV, P_CC, G, last, rk, rq, row, column, CT, PRECISION
        )
        tl.store(tile(dk, t - start, H * K, oc, ok), dk_CK.to(dk.dtype.element_ty), mask=here[:, None] & inside_K)

        dg = tl.cumsum(q_dq + dG, 0, reverse=True) + (last_dG + u)
        da_C = dg * g_slope
        tl.store(da + (t - start + oc) * H, da_C.to(da.dtype.element_ty), mask=here)
        tl.store(db + (t - start + oc) * H, ((1.0 - beta) * beta_dbeta).to(db.dtype.element_ty), mask=here)
        dA_log_C += tl.where(here, dg * g, 0.0)
        ddt_bias_C += tl.where(here, da_C, 0.0)
    tl.store(shares + segment, tl.sum(dA_log_C, 0))
    tl.store(shares + n_slots * H + segment, tl.sum(ddt_bias_C, 0))
    if INITIAL and start == begin:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(state_pointers(dinitial, document * H + h, ov, ok, K, V), dS, mask=inside)
