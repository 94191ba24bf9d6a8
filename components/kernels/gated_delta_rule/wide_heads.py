"""The gated delta rule in Triton for wide heads (K up to 128, any V): the kernels. README.md has formulas and symbols.

Chunks hold C = 64 tokens (or 32), and only a state of K by V has to wait for the one before it:

    gates          every chunk: running sums of the decay, beta                    (tiles.py)
    chunk_maps     every chunk: norms, T and P, and with them what the chunk does to a state S before it,
                   S' = (gamma + M) S + keys^T V  and  o = queries S + values V
    outputs        every sequence and block of values: walks along the chunks with the state in registers

and backward, where the gradient of the state goes by dS = (gamma + M)^T dS' + queries^T dO:

    states_before          every sequence and block of values: the state before each chunk
    state_gradients_after  the same, backwards: the gradient of the state after each chunk
    query_gradients        every chunk: dq and X, from the former
    key_gradients          every chunk: all other gradients, from both
    reduce_shares          sums over chunks                                        (tiles.py)

States are held V by K (S is a state transposed), in blocks of BV values: a state is then the left operand of every
product with it and needs no way through shared memory. The last two kernels walk the blocks.

Shapes: H heads, K, V widths (BK padded to a power of two, V to BLOCKS blocks of BV), C chunk. Chunk slots as in
tiles.py.
"""

import triton
import triton.language as tl

from components.kernels.gated_delta_rule.tiles import (
    EPS,
    document_bounds,
    dot,
    load_state,
    segment_bounds,
    state_pointers,
    tile,
)
from components.kernels.launcher import Kernel


@triton.jit
def _invert(A, row, column, LEVELS: tl.constexpr, IT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower-triangular A in blocks of 2, 4, ... : X <- X - X (A o M_w) X.

    IT is float16 beside bfloat16 inputs: no entry of the inverse exceeds one, and float16 keeps as many digits as tf32.
    """
    X = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, A, 0.0)
    for level in tl.static_range(1, LEVELS):
        w = 2 << level
        joins = (row // w == column // w) & (row // (w // 2) != column // (w // 2))
        X -= dot(dot(X, tl.where(joins, A, 0.0), IT, PRECISION), X, IT, PRECISION)
    return X


@triton.jit
def _chunk_vectors(vectors, chunk, oc, C: tl.constexpr):
    """G, the whole chunk's decay G_C, 1/|k| and scale/|q|."""
    vector = vectors + chunk * (6 * C)
    return tl.load(vector + oc), tl.load(vector + C - 1), tl.load(vector + 4 * C + oc), tl.load(vector + 5 * C + oc)


@triton.jit
def _chunk_gates(vectors, chunk, oc, C: tl.constexpr):
    """g and its slope in a (both zero on the floor), and beta."""
    vector = vectors + chunk * (6 * C)
    return tl.load(vector + 2 * C + oc), tl.load(vector + 3 * C + oc), tl.load(vector + C + oc)


@triton.jit
def _load_keys(q, k, token, q_stride, k_stride, h, here, oc, ok, GROUP: tl.constexpr, K: tl.constexpr):
    """A chunk's queries and keys (C by K), raw."""
    inside = here[:, None] & (ok < K)[None, :]
    q_CK = tl.load(tile(q + token * q_stride + h // GROUP * K, 0, q_stride, oc, ok), mask=inside, other=0.0)
    return q_CK, tl.load(tile(k + token * k_stride + h // GROUP * K, 0, k_stride, oc, ok), mask=inside, other=0.0)


@Kernel
@triton.jit(do_not_specialize=["T"])
def chunk_maps(
    q, k, TP, vectors, M, keys, queries, values, cu, slots, T, scale, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PACKED: tl.constexpr, CT: tl.constexpr, IT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: 1/|k| and scale/|q|, T with beta and P with norms and scale inside, and the chunk's maps.
    Norms and decays scale the operand that is not k, so that k enters every product as it came."""
    h, slot = tl.program_id(0) % H, tl.program_id(0) // H
    start, stop, document, _, _ = segment_bounds(slot, cu, slots, T, C, PACKED)
    if start >= stop:
        return
    chunk = (start // C + document).to(tl.int64) * H + h
    oc, ok = tl.arange(0, C), tl.arange(0, BK)
    row, column = oc[:, None], oc[None, :]
    q_CK, k_CK = _load_keys(q, k, start.to(tl.int64), q_stride, k_stride, h, start + oc < stop, oc, ok, GROUP, K)
    vector = vectors + chunk * (6 * C)
    G, last, beta = tl.load(vector + oc), tl.load(vector + C - 1), tl.load(vector + C + oc)
    kf, qf = k_CK.to(tl.float32), q_CK.to(tl.float32)
    rk = tl.rsqrt(tl.sum(kf * kf, 1) + EPS)
    rq = tl.rsqrt(tl.sum(qf * qf, 1) + EPS) * scale
    tl.store(vector + 4 * C + oc, rk)
    tl.store(vector + 5 * C + oc, rq)
    E, after = tl.exp2(G), tl.exp2(last - G) * rk

    D = tl.exp2(-tl.abs(G[:, None] - G[None, :])) * rk[None, :]
    P_CC = tl.where(row >= column, dot(q_CK, tl.trans(k_CK), CT, PRECISION) * D * rq[:, None], 0.0).to(CT)
    A = tl.where(row > column, dot(k_CK, tl.trans(k_CK), CT, PRECISION) * D * (beta * rk)[:, None], 0.0).to(IT)
    T_CC = _invert(A, row, column, LEVELS, IT, PRECISION) * beta[None, :]
    tile_CC, tile_CK = row * C + column, row * BK + ok[None, :]
    tl.store(TP + chunk * (2 * C * C) + tile_CC, T_CC.to(CT))
    tl.store(TP + chunk * (2 * C * C) + C * C + tile_CC, P_CC)
    tl.store(values + chunk * (C * C) + tile_CC, dot(P_CC, T_CC, CT, PRECISION).to(CT))

    keys_CK = dot(tl.trans((T_CC * after[:, None]).to(CT)), k_CK, CT, PRECISION)
    tl.store(keys + chunk * (C * BK) + tile_CK, keys_CK.to(CT))
    W_CK = dot(T_CC * (E * rk)[None, :], k_CK, CT, PRECISION)
    q_CK, _k_CK = _load_keys(q, k, start.to(tl.int64), q_stride, k_stride, h, start + oc < stop, oc, ok, GROUP, K)
    queries_CK = (E * rq)[:, None] * q_CK.to(tl.float32) - dot(P_CC, W_CK, CT, PRECISION)
    tl.store(queries + chunk * (C * BK) + tile_CK, queries_CK.to(CT))
    M_KK = dot(tl.trans(k_CK), W_CK * -after[:, None], CT, PRECISION)
    tl.store(M + chunk * (BK * BK) + ok[:, None] * BK + ok[None, :], M_KK.to(CT))


@triton.jit
def _load_chunk(x, M, maps, chunk, x_stride, t, end, oc, ok, ov, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """A chunk's values or their gradients (C by BV), M, and `keys` or `queries`."""
    x_CV = tl.load(tile(x, 0, x_stride, oc, ov), mask=(t + oc < end)[:, None] & (ov < V)[None, :], other=0.0)
    M_KK = tl.load(M + chunk * (BK * BK) + ok[:, None] * BK + ok[None, :])
    maps_CK = tl.load(maps + chunk * (C * BK) + oc[:, None] * BK + ok[None, :])
    return x_CV, M_KK, maps_CK


@Kernel
@triton.jit(do_not_specialize=["T"])
def outputs(
    v, M, keys, queries, values, vectors, initial, o, final, cu, T, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, CT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o and the last state of one document, head and block of values."""
    pid = tl.program_id(0)
    h, document = pid // BLOCKS % H, pid // (BLOCKS * H)
    begin, end, _ = document_bounds(document, cu, T, C, PACKED)
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), pid % BLOCKS * BV + tl.arange(0, BV)
    S = load_state(initial, document * H + h, ov, ok, K, V, INITIAL)
    for i in tl.range(0, tl.cdiv(end - begin, C), num_stages=STAGES):
        t = begin + i * C
        chunk = (t // C + document).to(tl.int64) * H + h
        token = t.to(tl.int64)
        block = v + token * v_stride + h * V
        v_CV, M_KK, keys_CK = _load_chunk(block, M, keys, chunk, v_stride, t, end, oc, ok, ov, V, C, BK)
        queries_CK = tl.load(queries + chunk * (C * BK) + oc[:, None] * BK + ok[None, :])
        values_CC = tl.load(values + chunk * (C * C) + oc[:, None] * C + oc[None, :])
        gamma = tl.exp2(tl.load(vectors + chunk * (6 * C) + C - 1))
        v_VC, Sc = tl.trans(v_CV), S.to(CT)
        o_VC = dot(Sc, tl.trans(queries_CK), CT, PRECISION) + dot(v_VC, tl.trans(values_CC), CT, PRECISION)
        S = gamma * S + dot(Sc, tl.trans(M_KK), CT, PRECISION) + dot(v_VC, keys_CK, CT, PRECISION)
        o_CV = tl.trans(o_VC.to(o.dtype.element_ty))
        inside = (t + oc < end)[:, None] & (ov < V)[None, :]
        tl.store(tile(o + token * (H * V) + h * V, 0, H * V, oc, ov), o_CV, mask=inside)
    if FINAL:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(state_pointers(final, document * H + h, ov, ok, K, V), S, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["T"])
def states_before(
    v, M, keys, vectors, initial, states, cu, T, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of one document, head and block of values."""
    pid = tl.program_id(0)
    h, document = pid // BLOCKS % H, pid // (BLOCKS * H)
    begin, end, _ = document_bounds(document, cu, T, C, PACKED)
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), pid % BLOCKS * BV + tl.arange(0, BV)
    S = load_state(initial, document * H + h, ov, ok, K, V, INITIAL)
    for i in tl.range(0, tl.cdiv(end - begin, C), num_stages=STAGES):
        t = begin + i * C
        chunk = (t // C + document).to(tl.int64) * H + h
        block = v + t.to(tl.int64) * v_stride + h * V
        v_CV, M_KK, keys_CK = _load_chunk(block, M, keys, chunk, v_stride, t, end, oc, ok, ov, V, C, BK)
        gamma, Sc = tl.exp2(tl.load(vectors + chunk * (6 * C) + C - 1)), S.to(CT)
        tl.store(states + chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :], Sc)
        S = gamma * S + dot(Sc, tl.trans(M_KK), CT, PRECISION) + dot(tl.trans(v_CV), keys_CK, CT, PRECISION)


@Kernel
@triton.jit(do_not_specialize=["T"])
def state_gradients_after(
    do, M, queries, vectors, dfinal, dstates, dinitial, cu, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, CT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after each chunk and of the initial state, for one document, head, block of values."""
    pid = tl.program_id(0)
    h, document = pid // BLOCKS % H, pid // (BLOCKS * H)
    begin, end, _ = document_bounds(document, cu, T, C, PACKED)
    oc, ok, ov = tl.arange(0, C), tl.arange(0, BK), pid % BLOCKS * BV + tl.arange(0, BV)
    n = tl.cdiv(end - begin, C)
    dS = load_state(dfinal, document * H + h, ov, ok, K, V, FINAL)
    for i in tl.range(0, n, num_stages=STAGES):
        t = begin + (n - 1 - i) * C
        chunk = (t // C + document).to(tl.int64) * H + h
        block = do + t.to(tl.int64) * (H * V) + h * V
        do_CV, M_KK, queries_CK = _load_chunk(block, M, queries, chunk, H * V, t, end, oc, ok, ov, V, C, BK)
        gamma, dSc = tl.exp2(tl.load(vectors + chunk * (6 * C) + C - 1)), dS.to(CT)
        tl.store(dstates + chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :], dSc)
        dS = gamma * dS + dot(dSc, M_KK, CT, PRECISION) + dot(tl.trans(do_CV), queries_CK, CT, PRECISION)
    if INITIAL:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(state_pointers(dinitial, document * H + h, ov, ok, K, V), dS, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["T"])
def query_gradients(
    q, k, v, do, TP, vectors, states, dv, dPD, sums, dq, cu, slots, T, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head, what the state before it decides: dq, and for `key_gradients` X in the place of dv, dPD
    with the queries' norms, and the sums of dPD o Q K^T with q . dq (sums: C). dq is per value head."""
    h, slot = tl.program_id(0) % H, tl.program_id(0) // H
    start, stop, document, _, _ = segment_bounds(slot, cu, slots, T, C, PACKED)
    if start >= stop:
        return
    chunk, token = (start // C + document).to(tl.int64) * H + h, start.to(tl.int64)
    oc, ok = tl.arange(0, C), tl.arange(0, BK)
    row, column, here = oc[:, None], oc[None, :], start + oc < stop
    q_CK, k_CK = _load_keys(q, k, token, q_stride, k_stride, h, here, oc, ok, GROUP, K)
    matrices = TP + chunk * (2 * C * C) + row * C + column
    T_CC, P_CC = tl.load(matrices), tl.load(matrices + C * C)
    G, _last, rk, rq = _chunk_vectors(vectors, chunk, oc, C)
    E, before = tl.exp2(G), tl.exp2(G) * rk
    values = token * (H * V) + h * V
    dq_CK, Z = tl.zeros((C, BK), tl.float32), tl.zeros((C, C), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        ov = block * BV + tl.arange(0, BV)
        inside_V = here[:, None] & (ov < V)[None, :]
        v_CV = tl.load(tile(v + token * v_stride + h * V, 0, v_stride, oc, ov), mask=inside_V, other=0.0)
        do_CV = tl.load(tile(do + values, 0, H * V, oc, ov), mask=inside_V, other=0.0)
        S_VK = tl.load(states + chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :])
        X = (v_CV.to(tl.float32) - before[:, None] * dot(k_CK, tl.trans(S_VK), CT, PRECISION)).to(CT)
        tl.store(tile(dv + values, 0, H * V, oc, ov), X.to(dv.dtype.element_ty), mask=inside_V)
        dq_CK += dot(do_CV, S_VK, CT, PRECISION)
        Z += dot(do_CV, tl.trans(dot(T_CC, X, CT, PRECISION).to(CT)), CT, PRECISION)

    qf, P = q_CK.to(tl.float32), P_CC.to(tl.float32)
    dq_CK *= E[:, None]
    q_dq = tl.sum(qf * dq_CK, 1) * rq + tl.sum(Z * P, 1)
    tl.store(sums + chunk * C + oc, q_dq - tl.sum(Z * P, 0))
    ZD = tl.where(row >= column, Z * tl.exp2(-tl.abs(G[:, None] - G[None, :])), 0.0)
    tl.store(dPD + chunk * (C * C) + row * C + column, (ZD * rq[:, None]).to(CT))
    dq_CK += dot(ZD * rk[None, :], k_CK, CT, PRECISION)
    dq_CK = dq_CK * rq[:, None] - qf * (q_dq * rq * rq / (scale * scale))[:, None]
    own = tile(dq + token * (H * K) + h * K, 0, H * K, oc, ok)
    tl.store(own, dq_CK.to(dq.dtype.element_ty), mask=here[:, None] & (ok < K)[None, :])


@triton.jit
def _through_inverse(Y, dk, k_CK, G, rk, row, column, CT: tl.constexpr, PRECISION: tl.constexpr):
    """Adds to dk (C by K) what comes through T, from Y = dX U^T; returns it with dA o A."""
    YD = tl.where(row > column, Y * -tl.exp2(-tl.abs(G[:, None] - G[None, :])), 0.0)
    dA_A = YD * dot(k_CK, tl.trans(k_CK), CT, PRECISION) * (rk[:, None] * rk[None, :])
    dk += dot(YD * rk[None, :], k_CK, CT, PRECISION)
    dk += dot(tl.trans((YD * rk[:, None]).to(CT)), k_CK, CT, PRECISION)
    return dk, dA_A


@triton.jit
def _gate_gradients(
    da, db, shares, vectors, chunk, oc, here, dG, last_dG, beta_dbeta, n_slots,
    H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores da, db and the chunk's shares of dA_log and ddt_bias."""
    g, g_slope, beta = _chunk_gates(vectors, chunk, oc, C)
    dg = tl.cumsum(dG, 0, reverse=True) + last_dG
    da_C = dg * g_slope
    tl.store(da + oc * H, da_C.to(da.dtype.element_ty), mask=here)
    tl.store(db + oc * H, ((1.0 - beta) * beta_dbeta).to(db.dtype.element_ty), mask=here)
    tl.store(shares, tl.sum(tl.where(here, dg * g, 0.0), 0))
    tl.store(shares + n_slots * H, tl.sum(tl.where(here, da_C, 0.0), 0))


@Kernel
@triton.jit(do_not_specialize=["T", "n_slots"])
def key_gradients(
    q, k, do, TP, vectors, states, dstates, dPD, sums, dk, dv, da, db, shares, cu, slots, T, q_stride, k_stride,
    n_slots,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The other gradients of one chunk and head, dX over the X that stands in dv. dk is per value head (summed over
    groups outside); shares holds each chunk's share of dA_log and ddt_bias."""
    h, slot = tl.program_id(0) % H, tl.program_id(0) // H
    start, stop, document, _, _ = segment_bounds(slot, cu, slots, T, C, PACKED)
    shares += slot.to(tl.int64) * H + h
    if start >= stop:
        tl.store(shares, 0.0)
        tl.store(shares + n_slots * H, 0.0)
        return
    chunk, token = (start // C + document).to(tl.int64) * H + h, start.to(tl.int64)
    oc, ok = tl.arange(0, C), tl.arange(0, BK)
    row, column, here = oc[:, None], oc[None, :], start + oc < stop
    q_CK, k_CK = _load_keys(q, k, token, q_stride, k_stride, h, here, oc, ok, GROUP, K)
    matrices = TP + chunk * (2 * C * C) + row * C + column
    T_CC, P_CC = tl.load(matrices), tl.load(matrices + C * C)
    G, last, rk, _rq = _chunk_vectors(vectors, chunk, oc, C)
    E, d = tl.exp2(G), tl.exp2(last - G)
    values = token * (H * V) + h * V
    dk_CK, Y, u = tl.zeros((C, BK), tl.float32), tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    dX_X, dX_KS, S_dS = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((BV,), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        ov = block * BV + tl.arange(0, BV)
        inside_V = here[:, None] & (ov < V)[None, :]
        do_CV = tl.load(tile(do + values, 0, H * V, oc, ov), mask=inside_V, other=0.0)
        X_CV = tl.load(tile(dv + values, 0, H * V, oc, ov), mask=inside_V, other=0.0)
        state = chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :]
        S_VK, dS_VK = tl.load(states + state), tl.load(dstates + state)
        S_dS += tl.sum(S_VK.to(tl.float32) * dS_VK.to(tl.float32), 1)
        KdS = (d * rk)[:, None] * dot(k_CK, tl.trans(dS_VK), CT, PRECISION)
        U = dot(T_CC, X_CV, CT, PRECISION)
        u += tl.sum(U * KdS, 1)
        dk_CK += dot(U * d[:, None], dS_VK, CT, PRECISION)
        dX = dot(tl.trans(T_CC), KdS + dot(tl.trans(P_CC), do_CV, CT, PRECISION), CT, PRECISION)
        tl.store(tile(dv + values, 0, H * V, oc, ov), dX.to(dv.dtype.element_ty), mask=inside_V)
        dX_X += tl.sum(dX * X_CV.to(tl.float32), 1)
        dX_KS += tl.sum(dX * dot(k_CK, tl.trans(S_VK), CT, PRECISION), 1)
        Y += dot(dX, tl.trans(U.to(CT)), CT, PRECISION)
        dk_CK += dot(dX * -E[:, None], S_VK, CT, PRECISION)

    kf = k_CK.to(tl.float32)
    dk_CK, dA_A = _through_inverse(Y, dk_CK, k_CK, G, rk, row, column, CT, PRECISION)
    dPD_CC = tl.load(dPD + chunk * (C * C) + row * C + column)
    dk_CK += dot(tl.trans(dPD_CC), q_CK, CT, PRECISION)
    dk_CK = dk_CK * rk[:, None] - kf * (tl.sum(kf * dk_CK, 1) * rk * rk * rk)[:, None]
    own = tile(dk + token * (H * K) + h * K, 0, H * K, oc, ok)
    tl.store(own, dk_CK.to(dk.dtype.element_ty), mask=here[:, None] & (ok < K)[None, :])

    rows = tl.sum(dA_A, 1)
    dG = tl.load(sums + chunk * C + oc) + rows - tl.sum(dA_A, 0) - u - E * rk * dX_KS
    last_dG, gate = tl.exp2(last) * tl.sum(S_dS, 0) + tl.sum(u, 0), token * H + h
    _gate_gradients(da + gate, db + gate, shares, vectors, chunk, oc, here, dG, last_dG, dX_X + rows, n_slots, H, C)
