"""The Triton form of the gated delta rule, host side: buffers, grids and the table of configurations.

No host synchronisation, no tuning at run time: sizes of buffers follow from shapes alone. What forward leaves for
backward is listed in `Saved`.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from components.kernels.gated_delta_rule import small_heads as kernels
from components.kernels.gated_delta_rule.chunk import Inputs


@dataclass(frozen=True)
class Config:
    """Tokens a chunk and a segment, state heads a value head is split into; for each kernel, how many chunks its loop
    holds at once (stages; 1 loads nothing ahead) and the warps of a program."""

    chunk: int = 16
    segment: int = 320
    split: int = 1
    chunks_per_program: int = 4
    matrix_stages: int = 2
    matrix_warps: int = 1
    summary_stages: int = 3
    scan_stages: int = 3
    scan_warps: int = 1
    output_stages: int = 3
    reverse_stages: int = 3
    recompute_stages: int = 3
    gradient_stages: int = 2
    warps: int = 1
    gradient_warps: int = 1


def choose(K: int, V: int, capability: tuple[int, int] = (9, 0)) -> Config | None:
    """The configuration for head widths, or None where there is no Triton form. It must not depend on B or T: packed
    documents have to give the bits of separate calls."""
    if max(K, V) <= 32:
        ahead = {} if capability >= (9, 0) else {"recompute_stages": 1, "gradient_stages": 1}  # else sm_80 spills
        return Config(**ahead)
    block = next((block for block in (64, 32, 16) if V % block == 0), V)
    if K > 128 or block > 64:
        return None
    sizes = {"split": V // block, "chunks_per_program": 1, "recompute_stages": 2}
    if K <= 64:
        return Config(**sizes, segment=512, warps=2, gradient_warps=2, scan_warps=4)
    return Config(**sizes, segment=2048, warps=4, gradient_warps=4, scan_warps=8, scan_stages=1)


@dataclass(frozen=True)
class Saved:
    """From forward to backward: T and P (chunk slots, H, 2, C, C), vectors (chunk slots, H, 6, C), the state before
    each segment and each segment's M (segment slots, H, ...). All lie in one buffer, the op's third output."""

    TP: Tensor
    vectors: Tensor
    states: Tensor
    M: Tensor


class Launch:
    """One call's shapes, and the keyword arguments its kernels share."""

    def __init__(self, x: Inputs, config: Config):
        self.x, self.config = x, config
        self.B, self.T, self.H, values = x.v_BTHV.shape
        self.split = config.split
        self.V, self.HS = values // self.split, self.H * self.split
        self.K = x.q_BTGK.shape[3]
        self.BK, self.BV = (max(16, triton.next_power_of_2(n)) for n in (self.K, self.V))
        self.packed = x.starts_L1 is not None
        self.documents = len(x.starts_L1) - 1 if self.packed else self.B
        tokens, C, L = self.B * self.T, config.chunk, config.segment
        self.n_chunks = tokens // C + self.documents
        self.n_slots = tokens // L + self.documents if self.packed else self.B * -(-self.T // L)
        exact = x.v_BTHV.dtype == torch.float32
        self.compute_dtype = torch.float32 if exact else torch.bfloat16
        self.inverse_dtype = tl.float32 if exact else tl.float16
        self.sizes = {"H": self.H, "K": self.K, "BK": self.BK, "L": L, "PACKED": self.packed}
        self.values = {"SPLIT": self.split, "V": self.V, "BV": self.BV}
        self.heads = {"GROUP": self.H // x.q_BTGK.shape[2], "C": C}
        self.numbers = {"CT": tl.float32 if exact else tl.bfloat16, "PRECISION": "tf32x3" if exact else "tf32"}
        self.starts = x.starts_L1 if self.packed else x.v_BTHV

    def saved_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each field of `Saved`, in order."""
        C = self.config.chunk
        return [
            ((self.n_chunks, self.H, 2, C, C), self.compute_dtype),
            ((self.n_chunks, self.H, 6, C), torch.float32),
            ((self.n_slots, self.HS, self.BV, self.BK), torch.float32),
            ((self.n_slots, self.HS, self.BK, self.BK), torch.float32),
        ]

    def saved_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.saved_shapes())

    def saved_in(self, buffer: Tensor) -> Saved:
        """The fields of `Saved` as views into `buffer` (uint8)."""
        views, start = [], 0
        for shape, dtype in self.saved_shapes():
            stop = start + math.prod(shape) * dtype.itemsize
            views.append(buffer[start:stop].view(dtype).view(shape))
            start = stop
        return Saved(*views)

    def shared_gradients(self) -> list[Tensor]:
        """Buffers for dq, dk, da, db: one a state head, in float32 where several are to be summed."""

        def one(like: Tensor, *inner: int) -> Tensor:
            dtype = like.dtype if like.shape[2] == self.HS else torch.float32
            return self.new(self.B, self.T, self.HS, *inner, dtype=dtype)

        return [one(self.x.q_BTGK, self.K), one(self.x.k_BTGK, self.K), one(self.x.a_BTH), one(self.x.b_BTH)]

    def scratch(self) -> tuple[Tensor, Tensor]:
        """What `gradients` hands from its way forward to its way back: states with X, and q . dq."""
        chunks, C = (self.n_chunks, self.HS), self.config.chunk
        return self.new(*chunks, self.BV, self.BK + C, dtype=self.compute_dtype), self.new(*chunks, C)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.v_BTHV.device)

    def over_slots(self) -> tuple[int]:
        return (self.n_slots * self.HS,)

    def slots(self) -> Tensor:
        """Each segment slot's document; any tensor where rows are documents, as kernels then do not read it."""
        if not self.packed:
            return self.x.v_BTHV
        slots = self.new(self.n_slots, dtype=torch.int32)
        kernels.find_documents[(triton.cdiv(self.n_slots, 128),)](
            self.x.starts_L1,
            slots,
            self.n_slots,
            self.documents,
            self.documents.bit_length(),
            L=self.config.segment,
            BLOCK=128,
        )
        return slots


def dense(x: Tensor) -> Tensor:
    """x itself if its tokens are evenly spaced over all rows and each token's heads lie together, else a copy."""
    inner = x.shape[3] if x.ndim == 4 else 1
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    together = x.stride(-1) == 1 and (x.ndim == 3 or x.stride(2) == inner)
    return x if even and together else x.contiguous()


def with_dense_inputs(x: Inputs) -> Inputs:
    tensors = (dense(y) for y in (x.q_BTGK, x.k_BTGK, x.v_BTHV, x.a_BTH, x.b_BTH))
    state = x.initial_state_LHKV
    return Inputs(*tensors, x.A_log_H, x.dt_bias_H, None if state is None else state.contiguous(), x.starts_L1, x.scale)


def forward(x: Inputs, config: Config, return_state: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o_BTHV, final_state_LHKV (empty unless asked for), and the buffer of what backward needs."""
    x = with_dense_inputs(x)
    c = Launch(x, config)
    C, slots = config.chunk, c.slots()
    buffer = c.new(c.saved_bytes(), dtype=torch.uint8)
    saved = c.saved_in(buffer)
    o = torch.empty(x.v_BTHV.shape, dtype=x.v_BTHV.dtype, device=x.v_BTHV.device)
    final = c.new(c.documents, c.H, c.K, x.v_BTHV.shape[3]) if return_state else c.new(0)
    BH = min(16, triton.next_power_of_2(c.H))
    kernels.gates[(c.n_slots * (config.segment // C) * triton.cdiv(c.H, BH),)](
        x.a_BTH, x.b_BTH, x.A_log_H, x.dt_bias_H, saved.vectors, c.starts, slots, c.T,
        x.a_BTH.stride(1), x.b_BTH.stride(1),
        H=c.H, BH=BH, C=C, L=config.segment, PACKED=c.packed, num_warps=1,
    )  # fmt: skip
    parts = config.segment // (C * config.chunks_per_program)
    kernels.chunk_matrices[(c.n_slots * parts * c.H,)](
        x.q_BTGK, x.k_BTGK, saved.TP, saved.vectors, c.starts, slots, c.T, x.scale,
        x.q_BTGK.stride(1), x.k_BTGK.stride(1), **c.sizes, **c.heads, **c.numbers,
        LEVELS=C.bit_length() - 1, PER=config.chunks_per_program, IT=c.inverse_dtype, STAGES=config.matrix_stages,
        num_warps=config.matrix_warps,
    )  # fmt: skip
    kernels.segment_summaries[c.over_slots()](
        x.k_BTGK, x.v_BTHV, saved.TP, saved.vectors, saved.states, saved.M,
        c.starts, slots, c.T, x.k_BTGK.stride(1), x.v_BTHV.stride(1),
        **c.sizes, **c.values, **c.heads, **c.numbers, STAGES=config.summary_stages, num_warps=config.warps,
    )  # fmt: skip
    kernels.scan_forward[(c.documents * c.HS,)](
        saved.states, saved.M, _or(x.initial_state_LHKV, o), c.starts, c.T, **c.sizes, **c.values,
        INITIAL=x.initial_state_LHKV is not None, STAGES=config.scan_stages, num_warps=config.scan_warps,
    )  # fmt: skip
    kernels.outputs[c.over_slots()](
        x.q_BTGK, x.k_BTGK, x.v_BTHV, saved.TP, saved.vectors, saved.states, o, final,
        c.starts, slots, c.T, x.q_BTGK.stride(1), x.k_BTGK.stride(1), x.v_BTHV.stride(1),
        **c.sizes, **c.values, **c.heads, **c.numbers, FINAL=return_state, STAGES=config.output_stages,
        num_warps=config.warps,
    )  # fmt: skip
    return o, final, buffer


def backward(
    x: Inputs, config: Config, buffer: Tensor, do_BTHV: Tensor, dfinal_LHKV: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, a, b, A_log, dt_bias and the initial state (None without one)."""
    x = with_dense_inputs(x)
    c = Launch(x, config)
    do, slots, saved = do_BTHV.contiguous(), c.slots(), c.saved_in(buffer)
    dfinal = None if dfinal_LHKV is None else dfinal_LHKV.contiguous()
    q, k, v, a, b = x.q_BTGK, x.k_BTGK, x.v_BTHV, x.a_BTH, x.b_BTH
    R = torch.empty_like(saved.states)
    kernels.segment_gradients[c.over_slots()](
        q, k, do, saved.TP, saved.vectors, R, _or(dfinal, do), c.starts, slots, c.T,
        q.stride(1), k.stride(1), **c.sizes, **c.values, **c.heads, **c.numbers,
        FINAL=dfinal is not None, STAGES=config.reverse_stages, num_warps=config.warps,
    )  # fmt: skip
    kernels.scan_backward[(c.documents * c.HS,)](
        R, saved.M, _or(dfinal, do), c.starts, c.T, **c.sizes, **c.values,
        FINAL=dfinal is not None, STAGES=config.scan_stages, num_warps=config.scan_warps,
    )  # fmt: skip
    dq, dk, da, db = c.shared_gradients()
    dv, dA_log, ddt_bias = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (v, x.A_log_H, x.dt_bias_H))
    dinitial = None if x.initial_state_LHKV is None else torch.empty_like(x.initial_state_LHKV)
    shares = c.new(2, c.n_slots, c.HS)
    kernels.gradients[c.over_slots()](
        q, k, v, do, do, saved.TP, saved.TP, saved.vectors, saved.states, R, *c.scratch(),
        dq, dk, dv, da, db, shares, _or(dinitial, do), c.starts, slots, c.T, x.scale,
        q.stride(1), k.stride(1), v.stride(1), c.n_slots,
        **c.sizes, **c.values, **c.heads, **c.numbers, INITIAL=dinitial is not None,
        STAGES=config.recompute_stages, BACK_STAGES=config.gradient_stages, num_warps=config.gradient_warps,
    )  # fmt: skip
    kernels.reduce_shares[(c.H,)](shares, dA_log, ddt_bias, c.n_slots, H=c.H, SPLIT=c.split, BLOCK=128)
    dq, dk, da, db = (_sum_shares(y, like) for y, like in ((dq, q), (dk, k), (da, a), (db, b)))
    return dq, dk, dv, da, db, dA_log, ddt_bias, dinitial


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's pointer argument that it will not read."""
    return other if x is None else x


def _sum_shares(d: Tensor, like: Tensor) -> Tensor:
    """A gradient that several state heads share, summed over them; (B, T, heads, ...) like `like`."""
    if d.shape == like.shape:
        return d
    return d.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)
