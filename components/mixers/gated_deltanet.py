"""Gated DeltaNet as its authors build the layer (Yang et al., arXiv 2412.06464, section 3.4; Chimera's recurrence).

    q, k, v = SiLU(CausalConv(x W_q)), SiLU(CausalConv(x W_k)), SiLU(CausalConv(x W_v))
    α = exp(−exp(A_log)·softplus(x W_a + dt_bias))       β = sigmoid(x W_b)
    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ         o_t = S_t q_t
    y   = (RMSNorm_V(o) ⊙ SiLU(x W_g)) W_out

The kernel normalises q and k and forms α and β from the raw projections. No rotary positions: the decay tells order.
Shapes: B batch, T sequence, D width, C = H (2 K + V) convolved channels, H heads, K key width, V value width, I = H V.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.interfaces import Aux, Context
from components.layers.folded import split_last
from components.layers.initial import LINEAR_STD, residual_std
from components.layers.norm import RMSNorm
from components.mixers.cache import RecurrentCache
from components.mixers.recurrence import Recurrence, RecurrentConfig, convolve, new_recurrent_cache
from components.parameters import Role, normal, rows, uniform, whole
from registry import register


@register("mixer", "gated_deltanet", example={"heads": 2, "key_dim": 8})
class GatedDeltaNet(nn.Module):
    """Gated delta rule with separate queries, keys and values, each convolved, and a gated norm."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
        heads: int  # heads H
        key_dim: int  # width K of a query or key head
        expand_v: int = 2  # width of a value head, over K
        conv_width: int = 4  # taps of the causal convolutions
        decay_init: Literal["gdn", "arange"] = "gdn"  # A ~ U(0, 16) with small steps, or A = 1..H with Δ = softplus(0)

        def __post_init__(self):
            if min(self.heads, self.key_dim, self.expand_v) < 1:
                raise ValueError("heads, key_dim and expand_v must be at least 1")
            if not 2 <= self.conv_width <= 4:
                raise ValueError(f"conv_width = {self.conv_width} must be 2, 3 or 4")
            super().__post_init__()

        @property
        def value_dim(self) -> int:
            return self.expand_v * self.key_dim

        @property
        def widths(self) -> dict[str, int]:
            """Channels of the queries, keys and values."""
            keys = self.heads * self.key_dim
            return {"q": keys, "k": keys, "v": self.heads * self.value_dim}

        @property
        def state_HKV(self) -> tuple[int, int, int]:
            return (self.heads, self.key_dim, self.value_dim)

        def matmul_parameters(self, dim: int) -> int:
            gate_and_out = 2 * self.heads * self.value_dim
            return dim * (sum(self.widths.values()) + gate_and_out + 2 * self.heads)

        def parameters(self, dim: int) -> int:
            convolutions = self.conv_width * sum(self.widths.values())
            return self.matmul_parameters(dim) + convolutions + 2 * self.heads + self.value_dim

    def __init__(self, config: Config, *, dim: int, layer: int, branches: int):
        super().__init__()
        c = self.config = config
        channels, inner = sum(c.widths.values()), c.heads * c.value_dim
        self.out_std = residual_std(branches)
        self.qkv = nn.Parameter(torch.empty(channels, dim))
        self.conv = nn.Parameter(torch.empty(channels, c.conv_width))
        self.gate = nn.Parameter(torch.empty(inner, dim))
        self.a_b = nn.Parameter(torch.empty(2 * c.heads, dim))
        self.recurrence = Recurrence(c.heads, c.decay_init, skip=False, chunk=c.chunk)
        self.norm = RMSNorm(RMSNorm.Config(), dim=c.value_dim)
        self.out = nn.Parameter(torch.empty(dim, inner))

    def roles(self) -> dict[str, Role]:
        c, linear, bound = self.config, normal(LINEAR_STD), self.config.conv_width**-0.5
        convolutions = {f"{name}_conv": width for name, width in c.widths.items()}
        return {
            "qkv": rows("matrix", c.widths, linear),
            "conv": rows("scalar", convolutions, uniform(-bound, bound)),
            "gate": whole("matrix", "gate", linear),
            "a_b": rows("matrix", {"a": c.heads, "b": c.heads}, linear),
            "out": whole("matrix", "out", normal(self.out_std)),
        }

    def forward(self, x_BTD: Tensor, ctx: Context, cache: RecurrentCache | None = None) -> tuple[Tensor, Aux]:
        c = self.config
        u_BTC, _, conv_BWC = convolve(F.linear(x_BTD, self.qkv), self.conv, ctx, cache)
        q, k, v = (x.unflatten(-1, (c.heads, -1)) for x in split_last(u_BTC, tuple(c.widths.values())))
        a_BTH, b_BTH = F.linear(x_BTD, self.a_b).chunk(2, -1)
        gate_BTI = F.linear(x_BTD, self.gate)
        y_BTI, state = self.recurrence(q, k, v, a_BTH, b_BTH, gate_BTI, self.norm, ctx, cache)
        if cache is not None:
            cache.advance(state, conv_BWC, x_BTD.shape[1])
        return F.linear(y_BTI, self.out), {}

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> RecurrentCache:
        return new_recurrent_cache(batch, self.config.state_HKV, self.conv, dtype, device)
