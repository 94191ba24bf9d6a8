"""The kernels of wide_heads.py, host side."""

from dataclasses import dataclass

import torch
import triton.language as tl

from components.kernels.gated_delta_rule import wide_heads as kernels
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.gated_delta_rule.launch import ALL_REGISTERS, Launch, Sizes, ceil_div, given


@dataclass(frozen=True)
class WideHeads:
    """Tokens a chunk; values a block, in the kernels that walk a sequence (sweep_block, a multiple of the others) and
    in those of a chunk; how many steps each loop holds at once (stages; 1 loads nothing ahead); warps of a program; the
    most registers that a thread of the kernels of a chunk may take."""

    chunk: int = 64
    sweep_block: int = 64
    query_block: int = 64
    key_block: int = 64
    output_stages: int = 3
    sweep_stages: int = 2
    query_stages: int = 3
    key_stages: int = 3
    sweep_warps: int = 4
    chunk_warps: int = 4
    map_registers: int = ALL_REGISTERS
    query_registers: int = ALL_REGISTERS
    key_registers: int = ALL_REGISTERS

    def launch(self, x: Inputs) -> Launch:
        return WideHeadsLaunch(x, self)


class WideHeadsLaunch(Launch):
    """Forward keeps of every chunk slot and head T and `values` (C, C), vectors (6, C), M transposed (K, K), `keys` and
    `queries` (C, K)."""

    def __init__(self, x: Inputs, config: WideHeads):
        super().__init__(x, config.chunk, config.chunk)
        self.config = config
        self.BK = max(self.BK, min(2 * self.C, 64))  # smaller tiles are miscompiled
        self.inverse_dtype = tl.float32 if self.exact else tl.float16
        self.sizes = {
            "H": self.H, "K": self.K, "BK": self.BK, "C": self.C, "PACKED": self.packed, **self.numbers,
        }  # fmt: skip
        self.heads = {"GROUP": self.H // self.G}
        self.rows = ceil_div(self.V, config.sweep_block) * config.sweep_block  # of a state, values with their padding
        self.swept, self.queried, self.keyed = (
            {"V": self.V, "BV": block, "BLOCKS": self.rows // block}
            for block in (config.sweep_block, config.query_block, config.key_block)
        )
        self.over_chunks, self.over_sequences = self.n_slots * self.H, self.documents * self.H * self.swept["BLOCKS"]

    def kept_sizes(self) -> Sizes:
        chunks, C, BK = self.n_chunks * self.H, self.C, self.BK
        return [
            (chunks * C * C, self.compute_dtype),
            (chunks * C * C, self.compute_dtype),
            (chunks * 6 * C, torch.float32),
            (chunks * BK * BK, self.compute_dtype),
            (chunks * C * BK, self.compute_dtype),
            (chunks * C * BK, self.compute_dtype),
        ]

    def backward_sizes(self) -> Sizes:
        chunks = self.n_chunks * self.H
        return [
            (chunks * self.rows * self.BK, self.compute_dtype),
            (chunks * self.rows * self.BK, self.compute_dtype),
            (chunks * self.C * self.C, self.compute_dtype),
            (chunks * self.C, torch.float32),
            (2 * self.n_slots * self.H, torch.float32),
        ]

    def launch_forward(self, taken, x, kept, slots, o, final) -> None:
        config, (T_beta, values, vectors, Mt, keys, queries) = self.config, kept
        q, k, v, initial = x.q_BTGK, x.k_BTGK, x.v_BTHV, given(x.initial_state_LHKV, o)
        where = self.where(x, slots, taken)
        self.gates(x, vectors, (6 * self.C, 1, self.C), where, taken)
        kernels.chunk_maps(
            self.over_chunks, q, k, T_beta, vectors, Mt, keys, queries, values, *where, x.scale,
            self.q_stride, self.k_stride, **self.sizes, **self.heads, LEVELS=self.C.bit_length() - 1,
            IT=self.inverse_dtype, num_warps=config.chunk_warps, maxnreg=config.map_registers, taken=taken,
        )  # fmt: skip
        kernels.outputs(
            self.over_sequences, v, Mt, keys, queries, values, vectors, initial, o, given(final, o), where[0], self.T,
            self.v_stride, **self.sizes, **self.swept, INITIAL=x.initial_state_LHKV is not None,
            FINAL=final is not None, STAGES=config.output_stages, num_warps=config.sweep_warps, taken=taken,
        )  # fmt: skip

    def launch_backward(
        self, taken, x, kept, slots, states, dstates, dPD, q_dq, shares,
        do, dfinal, dq, dk, dv, da, db, dA_log, ddt_bias, dinitial,
    ) -> None:  # fmt: skip
        config, (T_beta, values, vectors, Mt, keys, queries) = self.config, kept
        q, k, v, initial = x.q_BTGK, x.k_BTGK, x.v_BTHV, given(x.initial_state_LHKV, do)
        has_final, dfinal, where = dfinal is not None, given(dfinal, do), self.where(x, slots, taken)
        walk = {"STAGES": config.sweep_stages, "num_warps": config.sweep_warps, **self.sizes, **self.swept}
        walk["taken"] = taken
        kernels.states_before(
            self.over_sequences, v, Mt, keys, vectors, initial, states, where[0], self.T, self.v_stride,
            **walk, INITIAL=dinitial is not None,
        )  # fmt: skip
        kernels.state_gradients_after(
            self.over_sequences, do, Mt, queries, vectors, dfinal, dstates, given(dinitial, do), where[0], self.T,
            **walk, INITIAL=dinitial is not None, FINAL=has_final,
        )  # fmt: skip
        sizes = {**self.sizes, **self.heads, "num_warps": config.chunk_warps, "taken": taken}
        kernels.query_gradients(
            self.over_chunks, q, k, v, do, T_beta, vectors, states, dv, dPD, q_dq, dq, *where, x.scale,
            self.q_stride, self.k_stride, self.v_stride, **sizes, **self.queried, STAGES=config.query_stages,
            maxnreg=config.query_registers,
        )  # fmt: skip
        kernels.key_gradients(
            self.over_chunks, q, k, do, keys, values, vectors, states, dstates, dPD, q_dq, dk, dv, da, db, shares,
            *where, self.q_stride, self.k_stride, self.n_slots, **sizes, **self.keyed, STAGES=config.key_stages,
            maxnreg=config.key_registers,
        )  # fmt: skip
        self.reduce_shares(shares, dA_log, ddt_bias, taken)
