"""The gated delta rule in chunks, in PyTorch, with its backward written out: the form for CPUs and odd cases.

Work within a chunk is batched over all chunks at once; only three small products per chunk are serial. The
derivation is in README.md, whose symbols are used here. Everything is computed in float32 (float64 for float64
inputs). Documents are chunked one by one, so no chunk holds tokens of two, and no mask is needed for them.

Shapes: B rows, T tokens, H value heads, G query/key heads, K key width, V value width, N chunks of C tokens in a row,
L documents (`cu_seqlens` has L + 1 entries; without it every row is a document).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from components.kernels.gated_delta_rule.reference import (
    LOG_DECAY_FLOOR,
    NORM_EPS,
    l2_normalise,
    log_decay,
    state_dtype,
)

CHUNK = 64  # unless another is asked for


@dataclass(frozen=True)
class Inputs:
    """What the rule is applied to, as `op.gated_delta_rule` receives it. starts_L1: int32 document boundaries; chunk:
    tokens a chunk, 0 for the form's own choice."""

    q_BTGK: Tensor
    k_BTGK: Tensor
    v_BTHV: Tensor
    a_BTH: Tensor
    b_BTH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    initial_state_LHKV: Tensor | None
    starts_L1: Tensor | None
    scale: float
    chunk: int = 0

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (
            self.q_BTGK, self.k_BTGK, self.v_BTHV, self.a_BTH, self.b_BTH, self.A_log_H, self.dt_bias_H,
            self.initial_state_LHKV, self.starts_L1,
        )  # fmt: skip

    def layout(self) -> tuple:
        """All of them but their contents: what may differ between calls of equal layout is values and addresses."""
        each = [None if y is None else (y.shape, y.stride(), y.dtype, y.data_ptr() % 16) for y in self.tensors()]
        return self.v_BTHV.device, self.chunk, *each


@dataclass(frozen=True)
class Grid:
    """Which token stands where: chunk n of row b holds tokens token_BNC of the flattened rows where valid_BNC; a token
    stands at place_BT of the flattened chunks."""

    token_BNC: Tensor
    valid_BNC: Tensor
    place_BT: Tensor
    document_BN: Tensor
    first_BN: Tensor
    last_BN: Tensor

    def gather(self, x_BTX: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T, heads, ...) to (B, heads, N, C, ...), zero where there is no token."""
        x = x_BTX.flatten(0, 1)[self.token_BNC].to(dtype)
        x = x.masked_fill(~self.valid_BNC[(...,) + (None,) * (x.ndim - 3)], 0)
        return x.movedim(3, 1)

    def scatter(self, x_BHNCX: Tensor, like_BTX: Tensor) -> Tensor:
        """Back to (B, T, heads, ...), in the dtype of `like_BTX`."""
        return x_BHNCX.movedim(1, 3).flatten(0, 2)[self.place_BT].to(like_BTX.dtype)


@dataclass(frozen=True)
class Chunked:
    """The chunked inputs and everything the state does not enter; see README.md for each symbol."""

    grid: Grid
    q: Tensor  # (B, H, N, C, K) normalised, without the scale
    k: Tensor
    v: Tensor
    beta: Tensor  # (B, H, N, C, 1)
    E: Tensor  # exp of the decay since the chunk's start, (B, H, N, C, 1)
    d: Tensor  # exp of the decay until the chunk's end
    gamma: Tensor  # the whole chunk's, (B, H, N, 1, 1)
    D: Tensor  # (B, H, N, C, C), lower triangle
    KK: Tensor
    QK: Tensor
    A: Tensor
    inverse: Tensor


def forward(x: Inputs, return_state: bool = True) -> tuple[Tensor, Tensor | None]:
    """o_BTHV in the dtype of v, and the state after each document, final_state_LHKV, if asked for."""
    c = _chunk(x)
    S, U, final = _states(x, c, return_state)
    o = x.scale * (c.E * (c.q @ S) + (c.QK * c.D) @ U)
    return c.grid.scatter(o, x.v_BTHV), final


def backward(x: Inputs, do_BTHV: Tensor, dfinal_LHKV: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, a, b, A_log, dt_bias and the initial state (None without one)."""
    c = _chunk(x)
    S, U, _ = _states(x, c, False)
    dO = c.grid.gather(do_BTHV, S.dtype)
    dX, dr, dS_after, dinitial = _reverse_states(x, c, dO, dfinal_LHKV)

    dPD = x.scale * (dO @ U.mT) * c.D
    dA = -(dr @ U.mT).tril(-1)
    dKK = c.beta * dA * c.D
    dO_S, dX_S, U_dS = dO @ S.mT, dX @ S.mT, U @ dS_after.mT
    dq = x.scale * c.E * dO_S + dPD @ c.k
    dk = dPD.mT @ c.q + c.d * U_dS - c.E * dX_S + (dKK + dKK.mT) @ c.k
    dbeta = (dr * (c.v - c.E * (c.k @ S))).sum(-1) + (dA * c.KK * c.D).sum(-1)
    H = dPD * c.QK + dA * c.A
    u = c.d[..., 0] * (c.k * U_dS).sum(-1)
    dG = H.sum(-1) - H.sum(-2) + x.scale * c.E[..., 0] * (c.q * dO_S).sum(-1) - c.E[..., 0] * (c.k * dX_S).sum(-1) - u
    dG[..., -1] += u.sum(-1) + (c.gamma * S * dS_after).sum((-1, -2))
    dg = dG.flip(-1).cumsum(-1).flip(-1)

    back = c.grid.scatter
    dq_BTGK = _denormalise(back(_sum_groups(dq, x.q_BTGK.shape[2]), dq.new_empty(*x.q_BTGK.shape)), x.q_BTGK)
    dk_BTGK = _denormalise(back(_sum_groups(dk, x.k_BTGK.shape[2]), dk.new_empty(*x.k_BTGK.shape)), x.k_BTGK)
    da, dA_log, ddt_bias = _gate_gradients(back(dg, dg.new_empty(*x.a_BTH.shape)), x)
    beta = x.b_BTH.to(dbeta.dtype).sigmoid()
    db = back(dbeta, dbeta.new_empty(*x.b_BTH.shape)) * beta * (1 - beta)
    return dq_BTGK, dk_BTGK, back(dX, x.v_BTHV), da, db.to(x.b_BTH.dtype), dA_log, ddt_bias, dinitial


def _grid(x: Inputs) -> Grid:
    return _grid_of_rows(x) if x.starts_L1 is None else _grid_of_documents(x)


def _grid_of_rows(x: Inputs) -> Grid:
    """Rows are documents. All follows from shapes, so a graph can hold it."""
    B, T = x.v_BTHV.shape[:2]
    C, device = x.chunk or CHUNK, x.v_BTHV.device
    N = -(-T // C)
    row_B, chunk_N = torch.arange(B, device=device), torch.arange(N, device=device)
    within_NC = chunk_N[:, None] * C + torch.arange(C, device=device)
    token_BNC = row_B[:, None, None] * T + within_NC
    valid_BNC = (within_NC < T).expand(B, N, C)
    return Grid(
        token_BNC=token_BNC.where(valid_BNC, 0),
        valid_BNC=valid_BNC,
        place_BT=row_B[:, None] * (N * C) + torch.arange(T, device=device),
        document_BN=row_B[:, None].expand(B, N),
        first_BN=(chunk_N == 0).expand(B, N),
        last_BN=(chunk_N == N - 1).expand(B, N),
    )


def _grid_of_documents(x: Inputs) -> Grid:
    """Chunks of every document, row by row. Reads the boundaries on the host: not for graphs."""
    B, T = x.v_BTHV.shape[:2]
    C, device = x.chunk or CHUNK, x.v_BTHV.device
    starts = x.starts_L1.long()
    lengths = starts.diff()
    chunks = (lengths + C - 1) // C
    document = torch.repeat_interleave(torch.arange(len(chunks), device=device), chunks)
    within = torch.arange(len(document), device=device) - (chunks.cumsum(0) - chunks)[document]
    start = starts[document] + within * C
    row = start // T
    place = torch.arange(len(document), device=device) - torch.searchsorted(row, row)
    width = int(place.max()) + 1

    def table(values: Tensor, fill: int) -> Tensor:
        out = values.new_full((B, width), fill)
        out[row, place] = values
        return out

    start_BN, end_BN = table(start, 0), table(starts[document + 1], 0)
    token_BNC = start_BN[..., None] + torch.arange(C, device=device)
    valid_BNC = token_BNC < end_BN[..., None]
    place_BT = token_BNC.new_empty(B, T)
    place_BT.flatten()[token_BNC[valid_BNC]] = valid_BNC.flatten().nonzero()[:, 0]
    return Grid(
        token_BNC=token_BNC.where(valid_BNC, 0),
        valid_BNC=valid_BNC,
        place_BT=place_BT,
        document_BN=table(document, 0),
        first_BN=table(within == 0, False),
        last_BN=table(within == chunks[document] - 1, False),
    )


def _chunk(x: Inputs) -> Chunked:
    dtype, grid, groups = state_dtype(x.v_BTHV.dtype), _grid(x), x.v_BTHV.shape[2] // x.q_BTGK.shape[2]
    q, k = (l2_normalise(grid.gather(y, dtype)).repeat_interleave(groups, 1) for y in (x.q_BTGK, x.k_BTGK))
    g = log_decay(x.a_BTH.to(dtype), x.A_log_H.to(dtype), x.dt_bias_H.to(dtype))
    G = grid.gather(g, dtype).cumsum(-1)
    beta = grid.gather(x.b_BTH.to(dtype).sigmoid(), dtype)[..., None]
    C = G.shape[-1]
    lower = torch.ones(C, C, dtype=torch.bool, device=G.device).tril()
    D = (G[..., :, None] - G[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    KK = k @ k.mT
    A = (beta * KK * D).tril(-1)
    eye = torch.eye(C, dtype=dtype, device=G.device)
    return Chunked(
        grid=grid,
        q=q,
        k=k,
        v=grid.gather(x.v_BTHV, dtype),
        beta=beta,
        E=G.exp()[..., None],
        d=(G[..., -1:] - G).exp()[..., None],
        gamma=G[..., -1:, None].exp(),
        D=D,
        KK=KK,
        QK=q @ k.mT,
        A=A,
        inverse=torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True),
    )


def _states(x: Inputs, c: Chunked, return_state: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The state before each chunk (B, H, N, K, V), U (B, H, N, C, V), and each document's last state if asked for."""
    grid, initial = c.grid, x.initial_state_LHKV
    shape = (*c.v.shape[:2], c.k.shape[-1], c.v.shape[-1])
    state, final = c.v.new_zeros(shape), None
    if return_state:
        final = _of_documents(x, c).zero_() if initial is None else initial.to(c.v.dtype, copy=True)
    E_k, d_k, beta_v = c.E * c.k, c.d * c.k, c.beta * c.v
    S, U = [], []
    for n in range(c.v.shape[2]):
        before = 0 if initial is None else initial[grid.document_BN[:, n]].to(c.v.dtype)
        state = torch.where(grid.first_BN[:, n, None, None, None], before, state)
        S.append(state)
        U.append(c.inverse[:, :, n] @ (beta_v[:, :, n] - c.beta[:, :, n] * (E_k[:, :, n] @ state)))
        state = c.gamma[:, :, n] * state + d_k[:, :, n].mT @ U[-1]
        ends = grid.last_BN[:, n]
        if final is not None:
            final[grid.document_BN[ends, n]] = state[ends]
    return torch.stack(S, 2), torch.stack(U, 2), final


def _of_documents(x: Inputs, c: Chunked) -> Tensor:
    """An empty state for every document, (L, H, K, V)."""
    documents = len(c.v) if x.starts_L1 is None else len(x.starts_L1) - 1
    return c.v.new_empty(documents, c.v.shape[1], c.k.shape[-1], c.v.shape[-1])


def _reverse_states(
    x: Inputs, c: Chunked, dO: Tensor, dfinal_LHKV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dX, dr, the gradient of the state after each chunk, and of the initial states."""
    grid, N, dinitial = c.grid, c.v.shape[2], None
    if x.initial_state_LHKV is not None:  # an empty document hands its gradient through
        dinitial = _of_documents(x, c).zero_() if dfinal_LHKV is None else dfinal_LHKV.to(c.v.dtype, copy=True)
    dU_local = x.scale * (c.QK * c.D).mT @ dO
    dS_local = x.scale * (c.E * c.q).mT @ dO
    dstate = c.v.new_zeros(*c.v.shape[:2], c.k.shape[-1], c.v.shape[-1])
    dS_after, dX, dr = [None] * N, [None] * N, [None] * N
    for n in reversed(range(N)):
        document = grid.document_BN[:, n]
        after = 0 if dfinal_LHKV is None else dfinal_LHKV[document].to(c.v.dtype)
        dstate = torch.where(grid.last_BN[:, n, None, None, None], after, dstate)
        dS_after[n] = dstate
        dU = dU_local[:, :, n] + c.d[:, :, n] * (c.k[:, :, n] @ dstate)
        dr[n] = c.inverse[:, :, n].mT @ dU
        dX[n] = c.beta[:, :, n] * dr[n]
        dstate = c.gamma[:, :, n] * dstate + dS_local[:, :, n] - (c.E * c.k)[:, :, n].mT @ dX[n]
        begins = grid.first_BN[:, n]
        if dinitial is not None:
            dinitial[document[begins]] = dstate[begins]
    dX, dr, dS_after = (torch.stack(y, 2) for y in (dX, dr, dS_after))
    return dX, dr, dS_after, None if dinitial is None else dinitial.to(x.initial_state_LHKV.dtype)


def _sum_groups(d_BHNCK: Tensor, groups: int) -> Tensor:
    return d_BHNCK.unflatten(1, (groups, -1)).sum(2)


def _denormalise(dn: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of its normalised form."""
    wide = x.to(dn.dtype)
    scale = (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    unit = wide * scale
    return (scale * (dn - unit * (unit * dn).sum(-1, keepdim=True))).to(x.dtype)


def _gate_gradients(dg_BTH: Tensor, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, A_log and dt_bias; nothing passes where the decay stands at its floor."""
    pre = x.a_BTH.to(dg_BTH.dtype) + x.dt_bias_H.to(dg_BTH.dtype)
    rate = x.A_log_H.to(dg_BTH.dtype).exp()
    g = -rate * F.softplus(pre)
    free = g > LOG_DECAY_FLOOR
    da = torch.where(free, -rate * pre.sigmoid() * dg_BTH, 0)
    dA_log = torch.where(free, g * dg_BTH, 0).sum((0, 1))
    return da.to(x.a_BTH.dtype), dA_log.to(x.A_log_H.dtype), da.sum((0, 1)).to(x.dt_bias_H.dtype)
