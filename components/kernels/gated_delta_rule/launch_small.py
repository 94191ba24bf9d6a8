"""The kernels of small_heads.py, host side."""

from dataclasses import dataclass

import torch
import triton.language as tl

from components.kernels.gated_delta_rule import small_heads as kernels
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.gated_delta_rule.launch import ALL_REGISTERS, Launch, Sizes, ceil_div, given, padded


@dataclass(frozen=True)
class SmallHeads:
    """Tokens a chunk and a segment; for each kernel, how many chunks its loop holds at once (stages; 1 loads nothing
    ahead). Every program is one warp, but for those of `gradients` as stated. `summary_registers`: the most a thread of
    `segment_summaries` may take."""

    chunk: int = 16
    segment: int = 224
    chunks_per_program: int = 7
    matrix_stages: int = 3
    summary_stages: int = 2
    summary_registers: int = ALL_REGISTERS
    scan_stages: int = 3
    output_stages: int = 2
    reverse_stages: int = 3
    state_stages: int = 3
    gradient_stages: int = 3
    gradient_warps: int = 1

    def launch(self, x: Inputs) -> Launch:
        return SmallHeadsLaunch(x, self)


class SmallHeadsLaunch(Launch):
    """Forward keeps T and P (chunk slots, H, 2, C, C), vectors (chunk slots, H, C, 4), scales (chunk slots, H, 2, C,
    4), and of every token // L the state that crosses it (H, V, K) and the M of the segment before it (H, K, K)."""

    def __init__(self, x: Inputs, config: SmallHeads):
        super().__init__(x, config.chunk, config.segment)
        self.config = config
        self.BV = padded(self.V)
        self.n_carried = self.tokens // self.L
        self.inverse_dtype = tl.float32 if self.exact else tl.float16
        self.scans = {
            "H": self.H, "BK": self.BK, "BV": self.BV, "L": self.L, "PACKED": self.packed,
            "STAGES": config.scan_stages, "num_warps": 1,
        }  # fmt: skip
        self.sizes = {
            "H": self.H, "GROUP": self.H // self.G, "K": self.K, "BK": self.BK,
            "C": self.C, "L": self.L, "PACKED": self.packed, **self.numbers, "num_warps": 1,
        }  # fmt: skip
        self.values = {"V": self.V, "BV": self.BV}
        self.over_slots = self.n_slots * self.H
        self.over_scans = self.documents * self.H * (self.BV // 16)
        self.n_shares = self.n_slots * (self.L // self.C)

    def kept_sizes(self) -> Sizes:
        chunks, carried = self.n_chunks * self.H, self.n_carried * self.H
        return [
            (chunks * 2 * self.C * self.C, self.compute_dtype),
            (chunks * 4 * self.C, torch.float32),
            (chunks * 8 * self.C, torch.float32),
            (carried * self.BV * self.BK, torch.float32),
            (carried * self.BK * self.BK, torch.float32),
        ]

    def backward_sizes(self) -> Sizes:
        chunks = self.n_chunks * self.H
        return [
            (self.n_carried * self.H * self.BV * self.BK, torch.float32),
            (chunks * self.BV * (self.BK + self.C), self.compute_dtype),
            (chunks * self.C, torch.float32),
            (chunks * self.C, torch.float32),
            (2 * self.n_shares * self.H, torch.float32),
        ]

    def launch_forward(self, taken, x, kept, slots, o, final) -> None:
        config, (TP, vectors, scales, states, M) = self.config, kept
        q, k, v, initial = x.q_BTGK, x.k_BTGK, x.v_BTHV, given(x.initial_state_LHKV, o)
        has_initial, where = x.initial_state_LHKV is not None, self.where(x, slots, taken)
        self.gates(x, vectors, (4 * self.C, 4, 1), where, taken)
        parts = ceil_div(self.L, self.C * config.chunks_per_program)
        kernels.chunk_matrices(
            self.over_slots * parts, q, k, TP, vectors, scales, *where, x.scale, self.q_stride, self.k_stride,
            **self.sizes, LEVELS=self.C.bit_length() - 1, PER=config.chunks_per_program, IT=self.inverse_dtype,
            STAGES=config.matrix_stages, taken=taken,
        )  # fmt: skip
        kernels.segment_summaries(
            self.over_slots, k, v, TP, scales, states, M, *where, self.k_stride, self.v_stride,
            **self.sizes, **self.values, STAGES=config.summary_stages, maxnreg=config.summary_registers, taken=taken,
        )  # fmt: skip
        kernels.scan_forward(
            self.over_scans, states, M, initial, where[0], self.T,
            **self.scans, K=self.K, V=self.V, INITIAL=has_initial, taken=taken,
        )  # fmt: skip
        kernels.outputs(
            self.over_slots, q, k, v, TP, scales, states, initial, o, given(final, o), *where,
            self.q_stride, self.k_stride, self.v_stride,
            **self.sizes, **self.values, INITIAL=has_initial, FINAL=final is not None, STAGES=config.output_stages,
            taken=taken,
        )  # fmt: skip

    def launch_backward(
        self, taken, x, kept, slots, R, SU, dG, beta2_dbeta, shares,
        do, dfinal, dq, dk, dv, da, db, dA_log, ddt_bias, dinitial,
    ) -> None:  # fmt: skip
        config, (TP, vectors, scales, states, M) = self.config, kept
        q, k, v, initial = x.q_BTGK, x.k_BTGK, x.v_BTHV, given(x.initial_state_LHKV, do)
        has_initial, has_final, dfinal = x.initial_state_LHKV is not None, dfinal is not None, given(dfinal, do)
        where = self.where(x, slots, taken)
        walk = {**self.sizes, **self.values, "taken": taken}
        kernels.segment_gradients(
            self.over_slots, q, k, do, TP, scales, R, dfinal, *where, self.q_stride, self.k_stride, **walk,
            FINAL=has_final, STAGES=config.reverse_stages,
        )  # fmt: skip
        kernels.scan_backward(self.over_scans, R, M, where[0], self.T, **self.scans, taken=taken)
        kernels.chunk_states(
            self.over_slots, k, v, TP, scales, states, initial, SU, *where, self.k_stride, self.v_stride, **walk,
            INITIAL=has_initial, STAGES=config.state_stages,
        )  # fmt: skip
        kernels.gradients(
            self.over_slots, q, k, q, k, do, TP, scales, SU, R, dfinal, dq, dk, dv, dG, beta2_dbeta,
            given(dinitial, do), *where, x.scale, self.q_stride, self.k_stride,
            **(walk | {"num_warps": config.gradient_warps}),
            INITIAL=has_initial, FINAL=has_final, STAGES=config.gradient_stages,
        )  # fmt: skip
        kernels.gate_gradients(
            self.over_gates, dG, beta2_dbeta, vectors, da, db, shares, *where, self.n_shares, **self.gated,
            CT=self.numbers["CT"], num_warps=1, taken=taken,
        )  # fmt: skip
        self.reduce_shares(shares, dA_log, ddt_bias, taken)
