"""The gated delta rule in Triton for small heads (K, V <= 32): the kernels. README.md has the formulas and symbols.

A sequence is cut into segments, and segments into chunks of C tokens. One program is one warp with one head of one
segment; heads run fastest over the grid, so neighbours share memory lines. Forward:

    gates              every chunk: running sums of the decay, beta
    chunk_matrices     every chunk: norms, T and P, in parallel               (also what backward starts from)
    segment_summaries  every segment: S_out = S_in M + N
    scan_forward       every sequence: the state before each segment
    outputs            every segment, from the state before it

and backward the same way round:

    segment_gradients  every segment: what it adds to the gradient of the state before it
    scan_backward      every sequence: the gradient of the state before each segment
    chunk_states       every segment: the state before each chunk, and U
    gradients          every segment, back from the gradient of the state after it: dq, dk, dv, dG and dbeta
    gate_gradients     every chunk: da, db and shares of dA_log and ddt_bias, which `reduce_shares` sums

States are held V by K here (S is a state transposed), so that a state is the left operand of most products with it and
leaves the registers for none of those.

Shapes: H value heads, K, V widths (BK, BV padded to powers of two), C chunk, L segment. Slots as in tiles.py. Names of
a chunk's scalings: `before` turns a key into the one that asks the state before the chunk, `query` a query likewise,
`after` a key into the one that is kept until the chunk's end; gamma is the whole chunk's decay.
"""

import triton
import triton.language as tl

from components.kernels.gated_delta_rule.tiles import (
    EPS,
    document_bounds,
    dot,
    invert,
    load_state,
    segment_bounds,
    state_pointers,
    tile,
    transposed,
)
from components.kernels.launcher import Kernel


@triton.jit
def _store_four(base, a, b, c, d, oc):
    """Four vectors of the same tokens side by side (C by 4), so that one load fetches all."""
    four = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4))
    tl.store(base + oc[:, None] * 4 + tl.arange(0, 4)[None, :], four)


@triton.jit
def _load_four(base, oc):
    """The vectors that `_store_four` stored."""
    four = tl.load(base + oc[:, None] * 4 + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(four, (oc.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_scalings(scales, chunk, oc, C: tl.constexpr):
    """before, query and after."""
    before, query, after, _gamma = _load_four(scales + chunk * (8 * C), oc)
    return before, query, after


@triton.jit
def _load_decays(scales, chunk, oc, C: tl.constexpr):
    """D with the keys' norms (above the diagonal perhaps infinite, and never used), 1/|k| and scale/|q|."""
    G, rk, rq, _ = _load_four(scales + chunk * (8 * C) + 4 * C, oc)
    return tl.exp2(G[:, None] - G[None, :]) * rk[None, :], rk, rq


@triton.jit
def _load_gamma(scales, chunk, C: tl.constexpr, mask):
    """A walk loads it one step ahead, as a single number would not be prefetched."""
    return tl.load(scales + chunk * (8 * C) + 3, mask=mask, other=0.0)


@triton.jit
def _last_first():
    """The program's number, counted from the end: what the kernel before wrote last may still lie in the cache."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def _through_shared(x):
    """x itself, so written that as a right operand a product goes through shared memory: fewer instructions than
    shuffles and permutations."""
    return tl.trans(transposed(x))


@triton.jit
def _diagonal(x, row, column):
    return tl.sum(tl.where(row == column, x, 0.0), 1)


@Kernel
@triton.jit(do_not_specialize=["T"])
def chunk_matrices(
    q, k, TP, vectors, scales, cu, slots, T, scale, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    L: tl.constexpr, PER: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, IT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For PER chunks: T[j, i] = T_ij beta_j and after it P[j, i] = P_ij with the norms and the scale inside, and the
    scalings and norms of every token."""
    pid = tl.program_id(0)
    h = pid % H
    parts = tl.cdiv(L, C * PER)
    start, stop, document, _, _ = segment_bounds(pid // (H * parts), cu, slots, T, L, PACKED)
    start += pid // H % parts * C * PER
    stop = tl.minimum(stop, start + C * PER)
    first = start.to(tl.int64)
    q += first * q_stride + h // GROUP * K
    k += first * k_stride + h // GROUP * K
    oc, ok = tl.arange(0, C), tl.arange(0, BK)
    row, column = oc[:, None], oc[None, :]
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        inside = (t + oc < stop)[:, None] & (ok < K)[None, :]
        k_CK = tl.load(tile(k, t - start, k_stride, oc, ok), mask=inside, other=0.0)
        q_CK = tl.load(tile(q, t - start, q_stride, oc, ok), mask=inside, other=0.0)
        G, beta, _g, _slope = _load_four(vectors + chunk * (4 * C), oc)
        last = tl.load(vectors + chunk * (4 * C) + 4 * (C - 1))
        KK, QQ = dot(k_CK, tl.trans(k_CK), CT, PRECISION), dot(q_CK, tl.trans(q_CK), CT, PRECISION)
        rk = tl.rsqrt(_diagonal(KK, row, column) + EPS)
        rq = tl.rsqrt(_diagonal(QQ, row, column) + EPS) * scale
        E, d = tl.exp2(G), tl.exp2(last - G)
        _store_four(scales + chunk * (8 * C), E * rk, E * rq, d * rk, E * d, oc)
        _store_four(scales + chunk * (8 * C) + 4 * C, G, rk, rq, G, oc)
        D = tl.exp2(-tl.abs(G[None, :] - G[:, None])) * rk[:, None]
        KK = KK * D * -rk[None, :]
        minus_At = tl.where(row < column, KK * beta[None, :], 0.0)
        minus_A = tl.where(row > column, KK * beta[:, None], 0.0)
        X = invert(minus_At, minus_A, row, column, LEVELS, IT, PRECISION)
        P = tl.where(row <= column, dot(k_CK, tl.trans(q_CK), CT, PRECISION) * D * rq[None, :], 0.0)
        matrices = TP + chunk * (2 * C * C) + row * C + column
        tl.store(matrices, (X * beta[:, None]).to(CT))
        tl.store(matrices + C * C, P.to(CT))


@Kernel
@triton.jit(do_not_specialize=["T"])
def segment_summaries(
    k, v, TP, scales, N, M, cu, slots, T, k_stride, v_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """N (V by K) and M (K by K) of every segment that another follows: the recurrence from zero, and with no values
    from the identity."""
    pid = _last_first()
    h, slot = pid % H, pid // H
    start, stop, document, _, end = segment_bounds(slot, cu, slots, T, L, PACKED)
    if stop >= end:  # nothing comes after the last segment of a document
        return
    k += start.to(tl.int64) * k_stride + h // GROUP * K
    v += start.to(tl.int64) * v_stride + h * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    gamma = _load_gamma(scales, (start // C + document).to(tl.int64) * H + h, C, True)
    N_VK = tl.zeros((BV, BK), tl.float32)
    M_KK = tl.where(ok[:, None] == ok[None, :], 1.0, 0.0)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        k_CK = tl.load(tile(k, t - start, k_stride, oc, ok), mask=(ok < K)[None, :], other=0.0)
        v_CV = tl.load(tile(v, t - start, v_stride, oc, ov), mask=(ov < V)[None, :], other=0.0)
        T_CC = tl.load(TP + chunk * (2 * C * C) + oc[:, None] * C + oc[None, :])
        before, _query, after = _load_scalings(scales, chunk, oc, C)
        Ta = T_CC.to(tl.float32) * after[None, :]
        TM, Ta = (Ta * -before[:, None]).to(CT), Ta.to(CT)
        next_gamma = _load_gamma(scales, chunk + H, C, t + C < stop)
        kt = tl.trans(k_CK)
        U = dot(tl.trans(v_CV), Ta, CT, PRECISION) + dot(dot(N_VK, kt, CT, PRECISION), TM, CT, PRECISION)
        N_VK = gamma * N_VK + dot(U, k_CK, CT, PRECISION)
        U = dot(dot(M_KK, kt, CT, PRECISION), TM, CT, PRECISION)
        M_KK = gamma * M_KK + dot(U, k_CK, CT, PRECISION)
        gamma = next_gamma
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
    """Turns N of each segment, in `states`, into the state after it. One program a document, head and 16 values."""
    pid = tl.program_id(0) // (BV // 16)
    document, h = pid // H, pid % H
    begin, end, _ = document_bounds(document, cu, T, L, PACKED)
    ok, ov = tl.arange(0, BK), tl.program_id(0) % (BV // 16) * 16 + tl.arange(0, 16)
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


@triton.jit
def _store_state(base, state, S_VK, ov, ok, K: tl.constexpr, V: tl.constexpr):
    """S as the outside's state number `state`."""
    tl.store(state_pointers(base, state, ov, ok, K, V), S_VK, mask=(ov < V)[:, None] & (ok < K)[None, :])


@Kernel
@triton.jit(do_not_specialize=["T"])
def outputs(
    q, k, v, TP, scales, states, initial, o, final, cu, slots, T, q_stride, k_stride, v_stride,
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
    gamma = _load_gamma(scales, (start // C + document).to(tl.int64) * H + h, C, start < stop)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        q_CK, k_CK, T_CC, P_CC = _load_chunk(q, k, TP, chunk, t - start, q_stride, k_stride, here, oc, ok, K, C)
        v_CV = tl.load(tile(v, t - start, v_stride, oc, ov), mask=here & (ov < V)[None, :], other=0.0)
        before, query, after = _load_scalings(scales, chunk, oc, C)
        next_gamma = _load_gamma(scales, chunk + H, C, t + C < stop)
        TM = T_CC.to(tl.float32) * -before[:, None]
        U = dot(tl.trans(v_CV), T_CC, CT, PRECISION) + dot(dot(S, tl.trans(k_CK), CT, PRECISION), TM, CT, PRECISION)
        o_VC = query[None, :] * dot(S, tl.trans(q_CK), CT, PRECISION) + dot(U, P_CC, CT, PRECISION)
        S = gamma * S + dot(U * after[None, :], k_CK, CT, PRECISION)
        gamma = next_gamma
        o_CV = tl.trans(o_VC.to(o.dtype.element_ty))
        tl.store(tile(o, t - start, H * V, oc, ov), o_CV, mask=here & (ov < V)[None, :])
    if FINAL and stop == end:
        _store_state(final, document * H + h, S, ov, ok, K, V)


@Kernel
@triton.jit(do_not_specialize=["T"])
def segment_gradients(
    q, k, do, TP, scales, R, dfinal, cu, slots, T, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, CT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """R of every segment: the gradient of the state before it when that of the state after it is zero (or, for the
    last segment of a document, `dfinal`)."""
    pid = _last_first()
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
    gamma = _load_gamma(scales, ((start + (n - 1) * C) // C + document).to(tl.int64) * H + h, C, True)
    for i in tl.range(0, n, num_stages=STAGES):
        t = start + (n - 1 - i) * C
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        q_CK, k_CK, T_CC, P_CC = _load_chunk(q, k, TP, chunk, t - start, q_stride, k_stride, here, oc, ok, K, C)
        do_CV = tl.load(tile(do, t - start, H * V, oc, ov), mask=here & (ov < V)[None, :], other=0.0)
        before, query, after = _load_scalings(scales, chunk, oc, C)
        before, query, after = before[None, :], query[None, :], after[None, :]
        next_gamma = _load_gamma(scales, chunk - H, C, i + 1 < n)
        dU = dot(tl.trans(do_CV), tl.trans(P_CC), CT, PRECISION) + after * dot(dS, tl.trans(k_CK), CT, PRECISION)
        dX = dot(dU, tl.trans(T_CC), CT, PRECISION)
        dS = gamma * dS + dot(tl.trans(do_CV).to(tl.float32) * query, q_CK, CT, PRECISION)
        dS += dot(dX * -before, k_CK, CT, PRECISION)
        gamma = next_gamma
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
    """Turns R of each segment into the gradient of the state before it. One program a document, head and 16 values. R
    of the last segment is that already, as nothing comes after it."""
    pid = tl.program_id(0) // (BV // 16)
    document, h = pid // H, pid % H
    begin, end, _ = document_bounds(document, cu, T, L, PACKED)
    n = tl.cdiv(end - begin, L)
    ok, ov = tl.arange(0, BK), tl.program_id(0) % (BV // 16) * 16 + tl.arange(0, 16)
    tile_VK, tile_KK = ov[:, None] * BK + ok[None, :], ok[None, :] * BK + ok[:, None]
    where = ((begin // L + n - 2) * H + h).to(tl.int64)
    dS = tl.load(R + where * BV * BK + tile_VK, mask=n > 2, other=0.0)
    for i in tl.range(3, n + 1, num_stages=STAGES):
        where = ((begin // L + n - i) * H + h).to(tl.int64)
        R_VK = tl.load(R + where * BV * BK + tile_VK)
        Mt = tl.load(M + (where + H) * BK * BK + tile_KK)
        dS = R_VK + tl.dot(dS, Mt, input_precision="tf32x3")
        tl.store(R + where * BV * BK + tile_VK, dS)


@Kernel
@triton.jit(do_not_specialize=["T"])
def chunk_states(
    k, v, TP, scales, states, initial, SU, cu, slots, T, k_stride, v_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, CT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of every chunk the state before it (V by K) and, after that, U (C by V)."""
    pid = tl.program_id(0)
    h, slot = pid % H, pid // H
    start, stop, document, begin, _ = segment_bounds(slot, cu, slots, T, L, PACKED)
    if start >= stop:
        return
    k += start.to(tl.int64) * k_stride + h // GROUP * K
    v += start.to(tl.int64) * v_stride + h * V
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    S = _state_before(start, begin, states, initial, document, h, ov, ok, H, K, V, L, INITIAL)
    gamma = _load_gamma(scales, (start // C + document).to(tl.int64) * H + h, C, True)
    eye = tl.where(oc[:, None] == oc[None, :], 1.0, 0.0).to(CT)
    for t in tl.range(start, stop, C, num_stages=STAGES):
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        k_CK = tl.load(tile(k, t - start, k_stride, oc, ok), mask=here & (ok < K)[None, :], other=0.0)
        v_CV = tl.load(tile(v, t - start, v_stride, oc, ov), mask=here & (ov < V)[None, :], other=0.0)
        T_CC = tl.load(TP + chunk * (2 * C * C) + oc[:, None] * C + oc[None, :])
        before, _query, after = _load_scalings(scales, chunk, oc, C)
        next_gamma = _load_gamma(scales, chunk + H, C, t + C < stop)
        place, Sc = SU + chunk * (BV * (BK + C)), S.to(CT)
        tl.store(place + ov[:, None] * BK + ok[None, :], Sc)
        TM = T_CC.to(tl.float32) * -before[:, None]
        U = dot(tl.trans(v_CV), T_CC, CT, PRECISION) + dot(dot(Sc, tl.trans(k_CK), CT, PRECISION), TM, CT, PRECISION)
        U_CV = dot(eye, tl.trans(U.to(CT)), CT, PRECISION).to(CT)  # in the lanes that store whole rows
        tl.store(place + BV * BK + oc[:, None] * BV + ov[None, :], U_CV)
        S = gamma * S + dot(U * after[None, :], k_CK, CT, PRECISION)
        gamma = next_gamma


@triton.jit
def _inner_product(x, y, CT: tl.constexpr, PRECISION: tl.constexpr):
    """The sum over all elements of x o y, as the trace of a product (16 by 16): tensor cores multiply faster."""
    BV: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    x = tl.reshape(tl.permute(tl.reshape(x, (BV // 16, 16, BK)), (1, 0, 2)), (16, BV // 16 * BK))
    y = tl.reshape(tl.permute(tl.reshape(y, (BV // 16, 16, BK)), (1, 0, 2)), (16, BV // 16 * BK))
    products, o = dot(x, transposed(y.to(CT)), CT, PRECISION), tl.arange(0, 16)
    return tl.sum(tl.where(o[:, None] == o[None, :], products, 0.0))


@triton.jit
def _query_gradients(
    do_CV, before_do_CV, S_VK, U_VC, q_CK, k_CK, D, rq, per_scale2, eye, row, column,
    CT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (C by K), q . dq, and Z = dPD with the norms inside, its rows those of queries. A product with the identity
    brings q into the lanes of a product."""
    dq = dot(before_do_CV, S_VK, CT, PRECISION)
    Z = dot(do_CV, U_VC, CT, PRECISION) * (D * rq[:, None])
    Z = tl.where(row >= column, Z, 0.0).to(CT)
    dq += dot(Z, k_CK, CT, PRECISION)
    qf = dot(eye, q_CK, CT, PRECISION)
    q_dq = tl.sum(qf * dq, 1)
    return dq - qf * (q_dq * rq * rq * per_scale2)[:, None], q_dq, Z


@triton.jit
def _key_gradients(
    dX_CV, before_dX_CV, S_VK, dSc, U_CV, U_VC, Z, q_CK, k_CK, k_again_CK, D, rk, after, eye, row, column,
    CT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (C by K), what dG takes of it, u, and beta^2 dbeta = U . dX."""
    dk = dot(before_dX_CV, S_VK, CT, PRECISION)
    Y = dot(dX_CV, U_VC, CT, PRECISION)
    U_dX = _diagonal(Y, row, column)
    Y = tl.where(row > column, Y * (D * -rk[:, None]), 0.0).to(CT)
    dk += dot(Y, k_CK, CT, PRECISION)
    kf = dot(eye, k_again_CK, CT, PRECISION)
    asking = tl.sum(kf * dk, 1)  # k . dk of the key that asks what is there; the rest is of the key that is kept
    dk += after[:, None] * dot(U_CV, _through_shared(dSc), CT, PRECISION)
    u = tl.sum(kf * dk, 1) - asking  # the last token adds the sum of just these, so that they cancel
    dk += dot(tl.trans(Y), k_again_CK, CT, PRECISION)
    dk += dot(tl.trans(Z), q_CK, CT, PRECISION)
    k_dk = tl.sum(kf * dk, 1)
    return dk - kf * (k_dk * rk * rk)[:, None], 2 * asking - k_dk, u, U_dX


@triton.jit
def _gradient_after(
    R, dfinal, start, stop, end, document, h, ov, ok,
    H: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """That of the state after a segment, V by K."""
    if stop == end:
        dS = load_state(dfinal, document * H + h, ov, ok, K, V, FINAL)
    else:
        dS = tl.load(_carried(R, start + L, h, ov, ok, H, L))
    return dS


@triton.jit
def _value_gradients(
    k_CK, do_CV, dSc, matrices, before, after, C: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr
):
    """dX, which is dv too, and dX with what its tokens ask with (C by V), by the chunk's T and P."""
    dU = after[:, None] * dot(k_CK, transposed(dSc), CT, PRECISION)
    T_CC, P_CC = tl.load(matrices), tl.load(matrices + C * C)
    dU += dot(P_CC, do_CV, CT, PRECISION)
    dX = dot(T_CC, _through_shared(dU.to(CT)), CT, PRECISION)
    return dX.to(CT), (dX * -before[:, None]).to(CT)


@triton.jit
def _offsets(start, h, q_stride, k_stride, H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Where a segment of a head begins in q, in k, and in tensors of H heads of K and of V."""
    first = start.to(tl.int64)
    at_q, at_k = first * q_stride + h // GROUP * K, first * k_stride + h // GROUP * K
    return at_q, at_k, first * H * K + h * K, first * H * V + h * V


@Kernel
@triton.jit(do_not_specialize=["T"])
def gradients(
    q, k, q_again, k_again, do, TP, scales, SU, R, dfinal, dq, dk, dv, dG, beta2_dbeta, dinitial, cu, slots, T, scale,
    q_stride, k_stride, H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one segment, and of every token dG (the last of a chunk with what all take) and beta^2 dbeta.
    dq and dk are per value head (summed over groups outside). The order of products is one that fits the registers.
    q and k come twice, for as a part of one product they lie in other lanes than in another."""
    pid = _last_first()
    h, slot = pid % H, pid // H
    start, stop, document, begin, end = segment_bounds(slot, cu, slots, T, L, PACKED)
    if start >= stop and start != begin:
        return
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    row, column = oc[:, None], oc[None, :]
    inside_K, inside_V = (ok < K)[None, :], (ov < V)[None, :]
    at_q, at_k, at_K, at_V = _offsets(start, h, q_stride, k_stride, H, GROUP, K, V)
    q, k, q_again, k_again = q + at_q, k + at_k, q_again + at_q, k_again + at_k
    do, dq, dk, dv = do + at_V, dq + at_K, dk + at_K, dv + at_V
    dS = _gradient_after(R, dfinal, start, stop, end, document, h, ov, ok, H, L, K, V, FINAL)
    eye, per_scale2 = tl.where(row == column, 1.0, 0.0).to(CT), 1.0 / (scale * scale)
    n = tl.cdiv(stop - start, C)
    gamma = _load_gamma(scales, ((start + (n - 1) * C) // C + document).to(tl.int64) * H + h, C, n > 0)
    for i in tl.range(0, n, num_stages=STAGES):
        t = start + (n - 1 - i) * C
        chunk = (t // C + document).to(tl.int64) * H + h
        here = (t + oc < stop)[:, None]
        next_gamma, dSc = _load_gamma(scales, chunk - H, C, i + 1 < n), dS.to(CT)
        do_CV = tl.load(tile(do, t - start, H * V, oc, ov), mask=here & inside_V, other=0.0)
        S_VK = tl.load(SU + chunk * (BV * (BK + C)) + ov[:, None] * BK + ok[None, :])
        before, query, after = _load_scalings(scales, chunk, oc, C)
        before_do_CV = (dot(eye, do_CV, CT, PRECISION) * query[:, None]).to(CT)
        D, rk, rq = _load_decays(scales, chunk, oc, C)
        U_CV = tl.load(SU + chunk * (BV * (BK + C)) + BV * BK + oc[:, None] * BV + ov[None, :])
        U_VC = tl.trans(U_CV)
        k_CK = tl.load(tile(k, t - start, k_stride, oc, ok), mask=here & inside_K, other=0.0)
        q_CK = tl.load(tile(q, t - start, q_stride, oc, ok), mask=here & inside_K, other=0.0)
        dq_CK, q_dq, Z = _query_gradients(
            do_CV, before_do_CV, S_VK, U_VC, q_CK, k_CK, D, rq, per_scale2, eye, row, column, CT, PRECISION
        )
        tl.store(tile(dq, t - start, H * K, oc, ok), dq_CK.to(dq.dtype.element_ty), mask=here & inside_K)
        matrices = TP + chunk * (2 * C * C) + row * C + column
        dX_CV, before_dX_CV = _value_gradients(k_CK, do_CV, dSc, matrices, before, after, C, CT, PRECISION)
        tl.store(tile(dv, t - start, H * V, oc, ov), dX_CV, mask=here & inside_V)
        k_again_CK = tl.load(tile(k_again, t - start, k_stride, oc, ok), mask=here & inside_K, other=0.0)
        q_again_CK = tl.load(tile(q_again, t - start, q_stride, oc, ok), mask=here & inside_K, other=0.0)
        dk_CK, k_dG, u, U_dX = _key_gradients(
            dX_CV, before_dX_CV, S_VK, dSc, U_CV, U_VC, Z, q_again_CK, k_CK, k_again_CK, D, rk, after, eye, row, column,
            CT, PRECISION,
        )  # fmt: skip
        tl.store(tile(dk, t - start, H * K, oc, ok), dk_CK.to(dk.dtype.element_ty), mask=here & inside_K)
        whole = gamma * _inner_product(S_VK, dSc, CT, PRECISION) + tl.sum(u, 0)
        tl.store(dG + chunk * C + oc, q_dq + k_dG + tl.where(oc == C - 1, whole, 0.0))
        tl.store(beta2_dbeta + chunk * C + oc, U_dX)
        dS = gamma * dS + dot(tl.trans(before_do_CV), q_again_CK, CT, PRECISION)
        dS += dot(tl.trans(before_dX_CV), k_again_CK, CT, PRECISION)
        gamma = next_gamma
    if INITIAL and start == begin:
        _store_state(dinitial, document * H + h, dS, ov, ok, K, V)


@Kernel
@triton.jit(do_not_specialize=["T", "n"])
def gate_gradients(
    dG, beta2_dbeta, vectors, da, db, shares, cu, slots, T, n,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """da and db of one chunk and BH heads, and its share, of n, of dA_log and ddt_bias."""
    pid = tl.program_id(0)
    h = pid % tl.cdiv(H, BH) * BH + tl.arange(0, BH)
    part = pid // tl.cdiv(H, BH)
    start, stop, document, _, _ = segment_bounds(part // (L // C), cu, slots, T, L, PACKED)
    start += part % (L // C) * C
    oc = tl.arange(0, C)
    inside = (start + oc < stop)[:, None] & (h < H)[None, :]
    chunk = (start // C + document).to(tl.int64) * H + h
    vector, token = vectors + chunk[None, :] * (4 * C) + 4 * oc[:, None], chunk[None, :] * C + oc[:, None]
    dg = tl.cumsum(tl.load(dG + token, mask=(start < stop) & (h < H)[None, :], other=0.0), 0, reverse=True)
    beta = tl.load(vector + 1, mask=inside, other=0.0)
    g = tl.load(vector + 2, mask=inside, other=0.0)
    da_CH = dg * tl.load(vector + 3, mask=inside, other=0.0)
    strength = tl.maximum(beta.to(CT).to(tl.float32), 1e-30)  # as it stands in T, and so in both U and dX
    dbeta = tl.load(beta2_dbeta + token, mask=inside, other=0.0) / strength / strength
    where = (start + oc).to(tl.int64)[:, None] * H + h[None, :]
    tl.store(da + where, da_CH.to(da.dtype.element_ty), mask=inside)
    tl.store(db + where, (beta * (1.0 - beta) * dbeta).to(db.dtype.element_ty), mask=inside)
    share = shares + part.to(tl.int64) * H + h
    tl.store(share, tl.sum(dg * g, 0), mask=h < H)
    tl.store(share + n.to(tl.int64) * H, tl.sum(da_CH, 0), mask=h < H)
