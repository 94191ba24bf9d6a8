"""The gated delta rule in Triton for wide heads (K up to 128, any V): the kernels. README.md has formulas and symbols.

Chunks hold C = 64 tokens (or 32), and only a state of K by V has to wait for the one before it:

    gates          every chunk: running sums of the decay, beta                    (tiles.py)
    chunk_maps     every chunk: norms and T, and with them what the chunk does to a state S before it,
                   S' = (gamma + M) S + keys^T V  and  o = queries S + values V
    outputs        every sequence and block of values: walks along the chunks with the state in registers

and backward, where the gradient of the state goes by dS = (gamma + M)^T dS' + queries^T dO:

    states_before          every sequence and block of values: the state before each chunk
    state_gradients_after  the same, backwards: the gradient of the state after each chunk
    query_gradients        every chunk: dq and U, from the former
    key_gradients          every chunk: all other gradients, from both
    reduce_shares          sums over chunks                                        (tiles.py)

X = V - E K S is in no buffer: U stands in the place of dv until dX = keys dS' + values^T dO takes it.

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
    invert,
    load_state,
    segment_bounds,
    state_pointers,
    tile,
)
from components.kernels.launcher import Kernel


@triton.jit
def _invert(KK, beta, row, column, C: tl.constexpr, LEVELS: tl.constexpr, IT: tl.constexpr, PRECISION: tl.constexpr):
    """T = (I + A)^-1 of A = strict_lower(beta KK), KK symmetric: the tiles of 16 on the diagonal as a batch, each a
    warp's own, then blocks of 32, ... joined by products of the whole: X <- X - X (A o M_w) X."""
    N: tl.constexpr = C // 16
    block, o = tl.arange(0, N), tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    i, j = o[None, :, None], o[None, None, :]
    KK_NCC = tl.sum(tl.where(diagonal, tl.reshape(KK, (N, 16, N, 16)), 0.0), 2)
    beta_NC = tl.reshape(beta, (N, 16))
    minus_A = tl.where(i > j, KK_NCC * -beta_NC[:, :, None], 0.0)
    minus_At = tl.where(i < j, KK_NCC * -beta_NC[:, None, :], 0.0)
    X_NCC = invert(minus_A, minus_At, i, j, 4, IT, PRECISION)
    # The zeros lie as a product's result does: Triton then brings the tiles there at once. Without them it keeps X as
    # the batch lay and moves it for every product (at C = 64, 68 more stores to shared memory and 16 more loads).
    X = tl.reshape(tl.where(diagonal, X_NCC[:, :, None, :], 0.0), (C, C)) + KK * 0.0
    A = (KK * beta[:, None]).to(IT)
    for level in tl.static_range(4, LEVELS):
        w = 2 << level
        joins = (row // w == column // w) & (row // (w // 2) > column // (w // 2))
        X -= dot(dot(X, tl.where(joins, A, 0.0), IT, PRECISION), X, IT, PRECISION)
    return X


@triton.jit
def _decayed(x_CC, G, row, column, STRICT: tl.constexpr):
    """x o D, without its diagonal if STRICT."""
    below = row > column if STRICT else row >= column
    return tl.where(below, x_CC * tl.exp2(-tl.abs(G[:, None] - G[None, :])), 0.0)


@triton.jit
def _inverse_norm(x_CK):
    """1/|x| of each row."""
    xf = x_CK.to(tl.float32)
    return tl.rsqrt(tl.sum(xf * xf, 1) + EPS)


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
def _keys_of(x, token, stride, h, oc, ok, GROUP: tl.constexpr, K: tl.constexpr):
    """Where a chunk's queries or keys lie (C by K), raw."""
    return tile(x + token * stride + h // GROUP * K, 0, stride, oc, ok)


@triton.jit
def _store_key_maps(
    T_CC, k_CK, vector, T_beta, Mt, keys, chunk, oc, ok, C: tl.constexpr, BK: tl.constexpr, CT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """T with beta, M transposed and `keys`, from T alone. Returns T with beta, and 1/|k|."""
    G, last, beta = tl.load(vector + oc), tl.load(vector + C - 1), tl.load(vector + C + oc)
    rk = tl.load(vector + 4 * C + oc)
    T_CC *= beta[None, :]
    tl.store(T_beta + chunk * (C * C) + oc[:, None] * C + oc[None, :], T_CC.to(CT))
    keys_CK = dot(tl.trans((T_CC * (tl.exp2(last - G) * rk)[:, None]).to(CT)), k_CK, CT, PRECISION)
    tl.store(keys + chunk * (C * BK) + oc[:, None] * BK + ok[None, :], keys_CK.to(CT))
    Mt_KK = dot(tl.trans(k_CK), keys_CK * -(tl.exp2(G) * rk)[:, None], CT, PRECISION)
    tl.store(Mt + chunk * (BK * BK) + ok[:, None] * BK + ok[None, :], Mt_KK.to(CT))
    return T_CC, rk


@triton.jit
def _store_query_maps(
    T_CC, rk, k_CK, q, inside, vector, queries, values, chunk, oc, ok, scale, C: tl.constexpr, BK: tl.constexpr,
    CT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale/|q|, `values` and `queries`, from T with beta. q: where the chunk's queries lie."""
    row, column = oc[:, None], oc[None, :]
    q_CK = tl.load(q, mask=inside, other=0.0)
    G, rq = tl.load(vector + oc), _inverse_norm(q_CK) * scale
    P_CC = _decayed(dot(q_CK, tl.trans(k_CK), CT, PRECISION), G, row, column, False) * rq[:, None] * rk[None, :]
    tl.store(vector + 5 * C + oc, rq)
    values_CC = dot(P_CC, T_CC, CT, PRECISION)
    tl.store(values + chunk * (C * C) + row * C + column, values_CC.to(CT))
    E, q_CK = tl.exp2(G), tl.load(q, mask=inside, other=0.0)
    queries_CK = (E * rq)[:, None] * q_CK.to(tl.float32) - dot(values_CC * (E * rk)[None, :], k_CK, CT, PRECISION)
    tl.store(queries + chunk * (C * BK) + row * BK + ok[None, :], queries_CK.to(CT))


@Kernel
@triton.jit(do_not_specialize=["T"])
def chunk_maps(
    q, k, T_beta, vectors, Mt, keys, queries, values, cu, slots, T, scale, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PACKED: tl.constexpr, CT: tl.constexpr, IT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: 1/|k| and scale/|q|, T with beta, and the chunk's maps, M transposed. Norms and decays
    scale the operand that is not k, so that k enters every product as it came. q and vectors are loaded again wherever
    they are needed again: held, they would take registers for which fewer programs fit a multiprocessor."""
    h, slot = tl.program_id(0) % H, tl.program_id(0) // H
    start, stop, document, _, _ = segment_bounds(slot, cu, slots, T, C, PACKED)
    if start >= stop:
        return
    chunk, token = (start // C + document).to(tl.int64) * H + h, start.to(tl.int64)
    oc, ok = tl.arange(0, C), tl.arange(0, BK)
    inside = (start + oc < stop)[:, None] & (ok < K)[None, :]
    k_CK = tl.load(_keys_of(k, token, k_stride, h, oc, ok, GROUP, K), mask=inside, other=0.0)
    q = _keys_of(q, token, q_stride, h, oc, ok, GROUP, K)
    vector = vectors + chunk * (6 * C)
    G, beta, rk = tl.load(vector + oc), tl.load(vector + C + oc), _inverse_norm(k_CK)
    tl.store(vector + 4 * C + oc, rk)
    D = tl.exp2(-tl.abs(G[:, None] - G[None, :])) * rk[None, :]
    KK = dot(k_CK, tl.trans(k_CK), CT, PRECISION) * D * rk[:, None]
    T_CC = _invert(KK, beta, oc[:, None], oc[None, :], C, LEVELS, IT, PRECISION)
    tl.debug_barrier()  # lanes read the 1/|k| that others wrote
    T_CC, rk = _store_key_maps(T_CC, k_CK, vector, T_beta, Mt, keys, chunk, oc, ok, C, BK, CT, PRECISION)
    _store_query_maps(T_CC, rk, k_CK, q, inside, vector, queries, values, chunk, oc, ok, scale, C, BK, CT, PRECISION)


@triton.jit
def _load_chunk(x, Mt, maps, chunk, x_stride, t, end, oc, ok, ov, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """A chunk's values or their gradients (C by BV), M transposed, and `keys` or `queries`."""
    x_CV = tl.load(tile(x, 0, x_stride, oc, ov), mask=(t + oc < end)[:, None] & (ov < V)[None, :], other=0.0)
    Mt_KK = tl.load(Mt + chunk * (BK * BK) + ok[:, None] * BK + ok[None, :])
    maps_CK = tl.load(maps + chunk * (C * BK) + oc[:, None] * BK + ok[None, :])
    return x_CV, Mt_KK, maps_CK


@Kernel
@triton.jit(do_not_specialize=["T"])
def outputs(
    v, Mt, keys, queries, values, vectors, initial, o, final, cu, T, v_stride,
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
        v_CV, Mt_KK, keys_CK = _load_chunk(block, Mt, keys, chunk, v_stride, t, end, oc, ok, ov, V, C, BK)
        queries_CK = tl.load(queries + chunk * (C * BK) + oc[:, None] * BK + ok[None, :])
        values_CC = tl.load(values + chunk * (C * C) + oc[:, None] * C + oc[None, :])
        gamma = tl.exp2(tl.load(vectors + chunk * (6 * C) + C - 1))
        v_VC, Sc = tl.trans(v_CV), S.to(CT)
        o_VC = dot(Sc, tl.trans(queries_CK), CT, PRECISION) + dot(v_VC, tl.trans(values_CC), CT, PRECISION)
        S = gamma * S + dot(Sc, Mt_KK, CT, PRECISION) + dot(v_VC, keys_CK, CT, PRECISION)
        o_CV = tl.trans(o_VC.to(o.dtype.element_ty))
        inside = (t + oc < end)[:, None] & (ov < V)[None, :]
        tl.store(tile(o + token * (H * V) + h * V, 0, H * V, oc, ov), o_CV, mask=inside)
    if FINAL:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(state_pointers(final, document * H + h, ov, ok, K, V), S, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["T"])
def states_before(
    v, Mt, keys, vectors, initial, states, cu, T, v_stride,
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
        v_CV, Mt_KK, keys_CK = _load_chunk(block, Mt, keys, chunk, v_stride, t, end, oc, ok, ov, V, C, BK)
        gamma, Sc = tl.exp2(tl.load(vectors + chunk * (6 * C) + C - 1)), S.to(CT)
        tl.store(states + chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :], Sc)
        S = gamma * S + dot(Sc, Mt_KK, CT, PRECISION) + dot(tl.trans(v_CV), keys_CK, CT, PRECISION)


@Kernel
@triton.jit(do_not_specialize=["T"])
def state_gradients_after(
    do, Mt, queries, vectors, dfinal, dstates, dinitial, cu, T,
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
        do_CV, Mt_KK, queries_CK = _load_chunk(block, Mt, queries, chunk, H * V, t, end, oc, ok, ov, V, C, BK)
        gamma, dSc = tl.exp2(tl.load(vectors + chunk * (6 * C) + C - 1)), dS.to(CT)
        tl.store(dstates + chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :], dSc)
        dS = gamma * dS + dot(dSc, tl.trans(Mt_KK), CT, PRECISION) + dot(tl.trans(do_CV), queries_CK, CT, PRECISION)
    if INITIAL:
        inside = (ov < V)[:, None] & (ok < K)[None, :]
        tl.store(state_pointers(dinitial, document * H + h, ov, ok, K, V), dS, mask=inside)


@triton.jit
def _finish_queries(dO_S, dO_U, q_CK, k_CK, G, rk, rq, scale, row, column, CT: tl.constexpr, PRECISION: tl.constexpr):
    """dq from dO S^T and dO U^T; dPD with both norms, rounded, and q . dq before the norm's part."""
    qf = q_CK.to(CT).to(tl.float32)  # as products see it, so that sums by rows and by columns agree
    dPD_CC = (_decayed(dO_U, G, row, column, False) * rq[:, None] * rk[None, :]).to(CT)
    dq_CK = dO_S * (tl.exp2(G) * rq)[:, None] + dot(dPD_CC, k_CK, CT, PRECISION)
    q_dq = tl.sum(qf * dq_CK, 1)
    return dq_CK - qf * (q_dq * rq * rq / (scale * scale))[:, None], dPD_CC, q_dq


@Kernel
@triton.jit(do_not_specialize=["T"])
def query_gradients(
    q, k, v, do, T_beta, vectors, states, dv, dPD, q_dq, dq, cu, slots, T, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head, what the state before it decides: dq, and for `key_gradients` U in the place of dv, dPD
    with both norms, and q . dq (C). dq is per value head."""
    h, slot = tl.program_id(0) % H, tl.program_id(0) // H
    start, stop, document, _, _ = segment_bounds(slot, cu, slots, T, C, PACKED)
    if start >= stop:
        return
    chunk, token = (start // C + document).to(tl.int64) * H + h, start.to(tl.int64)
    oc, ok = tl.arange(0, C), tl.arange(0, BK)
    row, column, here = oc[:, None], oc[None, :], start + oc < stop
    inside = here[:, None] & (ok < K)[None, :]
    k_CK = tl.load(_keys_of(k, token, k_stride, h, oc, ok, GROUP, K), mask=inside, other=0.0)
    T_CC = tl.load(T_beta + chunk * (C * C) + row * C + column)
    G, _last, rk, rq = _chunk_vectors(vectors, chunk, oc, C)
    before = tl.exp2(G) * rk
    own = token * (H * V) + h * V
    dO_S, dO_U = tl.zeros((C, BK), tl.float32), tl.zeros((C, C), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        ov = block * BV + tl.arange(0, BV)
        inside_V = here[:, None] & (ov < V)[None, :]
        v_CV = tl.load(tile(v + token * v_stride + h * V, 0, v_stride, oc, ov), mask=inside_V, other=0.0)
        do_CV = tl.load(tile(do + own, 0, H * V, oc, ov), mask=inside_V, other=0.0)
        S_VK = tl.load(states + chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :])
        X = (v_CV.to(tl.float32) - before[:, None] * dot(k_CK, tl.trans(S_VK), CT, PRECISION)).to(CT)
        dO_S += dot(do_CV, S_VK, CT, PRECISION)
        U = dot(T_CC, X, CT, PRECISION).to(CT)
        tl.store(tile(dv + own, 0, H * V, oc, ov), U.to(dv.dtype.element_ty), mask=inside_V)
        dO_U += dot(do_CV, tl.trans(U), CT, PRECISION)

    q_CK = tl.load(_keys_of(q, token, q_stride, h, oc, ok, GROUP, K), mask=inside, other=0.0)
    dq_CK, dPD_CC, q_dq_C = _finish_queries(dO_S, dO_U, q_CK, k_CK, G, rk, rq, scale, row, column, CT, PRECISION)
    tl.store(q_dq + chunk * C + oc, q_dq_C)
    tl.store(dPD + chunk * (C * C) + row * C + column, dPD_CC)
    where = tile(dq + token * (H * K) + h * K, 0, H * K, oc, ok)
    tl.store(where, dq_CK.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _finish_keys(
    dX_U, dX_S, U_dS, dPD_CC, q_CK, k_CK, G, last, rk, row, column, CT: tl.constexpr, PRECISION: tl.constexpr
):
    """dk from dX U^T, dX S^T and U dS'^T; what k . dk (before the norm's part) adds to dG, and u. The gradients of keys
    that ask and of those that are kept stand apart until their sums are taken."""
    kf = k_CK.to(CT).to(tl.float32)  # as products see it
    dKK_CC = (_decayed(dX_U, G, row, column, True) * -rk[:, None] * rk[None, :]).to(CT)
    kept = U_dS * (tl.exp2(last - G) * rk)[:, None]
    u = tl.sum(kf * kept, 1)
    asked = dX_S * -(tl.exp2(G) * rk)[:, None] + dot(dKK_CC, k_CK, CT, PRECISION)
    kept += dot(tl.trans(dKK_CC), k_CK, CT, PRECISION)
    kept += dot(tl.trans(dPD_CC), q_CK, CT, PRECISION)
    k_asked, k_kept = tl.sum(kf * asked, 1), tl.sum(kf * kept, 1)
    return asked + kept - kf * ((k_asked + k_kept) * rk * rk)[:, None], k_asked - k_kept, u


@triton.jit
def _gate_gradients(
    da, db, shares, vectors, chunk, oc, here, dG, last_dG, U_dX, n_slots,
    H: tl.constexpr, C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Stores da, db and the chunk's shares of dA_log and ddt_bias."""
    g, g_slope, beta = _chunk_gates(vectors, chunk, oc, C)
    dg = tl.cumsum(dG, 0, reverse=True) + last_dG
    da_C = dg * g_slope
    beta_dbeta = U_dX / tl.maximum(beta.to(CT).to(tl.float32), 1e-30)  # beta as it stands in T, and so in U
    tl.store(da + oc * H, da_C.to(da.dtype.element_ty), mask=here)
    tl.store(db + oc * H, ((1.0 - beta) * beta_dbeta).to(db.dtype.element_ty), mask=here)
    tl.store(shares, tl.sum(tl.where(here, dg * g, 0.0), 0))
    tl.store(shares + n_slots * H, tl.sum(tl.where(here, da_C, 0.0), 0))


@Kernel
@triton.jit(do_not_specialize=["T", "n_slots"])
def key_gradients(
    q, k, do, keys, values, vectors, states, dstates, dPD, q_dq, dk, dv, da, db, shares, cu, slots, T, q_stride,
    k_stride, n_slots,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, CT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The other gradients of one chunk and head, dX over the U that stands in dv. dk is per value head (summed over
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
    keys_CK = tl.load(keys + chunk * (C * BK) + row * BK + ok[None, :])
    values_CC = tl.load(values + chunk * (C * C) + row * C + column)
    own = token * (H * V) + h * V
    dX_S, U_dS, dX_U = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32), tl.zeros((C, C), tl.float32)
    U_dX, S_dS = tl.zeros((C,), tl.float32), tl.zeros((BV,), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        ov = block * BV + tl.arange(0, BV)
        inside_V = here[:, None] & (ov < V)[None, :]
        do_CV = tl.load(tile(do + own, 0, H * V, oc, ov), mask=inside_V, other=0.0)
        U_CV = tl.load(tile(dv + own, 0, H * V, oc, ov), mask=inside_V, other=0.0)
        state = chunk * (BLOCKS * BV * BK) + ov[:, None] * BK + ok[None, :]
        S_VK, dS_VK = tl.load(states + state), tl.load(dstates + state)
        dX = dot(keys_CK, tl.trans(dS_VK), CT, PRECISION) + dot(tl.trans(values_CC), do_CV, CT, PRECISION)
        U_dS += dot(U_CV, dS_VK, CT, PRECISION)
        S_dS += tl.sum(S_VK.to(tl.float32) * dS_VK.to(tl.float32), 1)
        U_dX += tl.sum(dX * U_CV.to(tl.float32), 1)
        tl.store(tile(dv + own, 0, H * V, oc, ov), dX.to(dv.dtype.element_ty), mask=inside_V)
        dX_U += dot(dX, tl.trans(U_CV), CT, PRECISION)
        dX_S += dot(dX, S_VK, CT, PRECISION)

    inside = here[:, None] & (ok < K)[None, :]
    q_CK = tl.load(_keys_of(q, token, q_stride, h, oc, ok, GROUP, K), mask=inside, other=0.0)
    k_CK = tl.load(_keys_of(k, token, k_stride, h, oc, ok, GROUP, K), mask=inside, other=0.0)
    G, last, rk, _rq = _chunk_vectors(vectors, chunk, oc, C)
    dPD_CC = tl.load(dPD + chunk * (C * C) + row * C + column)
    dk_CK, k_dk, u = _finish_keys(dX_U, dX_S, U_dS, dPD_CC, q_CK, k_CK, G, last, rk, row, column, CT, PRECISION)
    where = tile(dk + token * (H * K) + h * K, 0, H * K, oc, ok)
    tl.store(where, dk_CK.to(dk.dtype.element_ty), mask=inside)
    dG, last_dG = tl.load(q_dq + chunk * C + oc) + k_dk, tl.exp2(last) * tl.sum(S_dS, 0) + tl.sum(u, 0)
    gate = token * H + h
    _gate_gradients(da + gate, db + gate, shares, vectors, chunk, oc, here, dG, last_dG, U_dX, n_slots, H, C, CT)
