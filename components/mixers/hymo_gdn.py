"""HyMo's gated delta rule mixer (Gated DeltaNet, Yang et al., arXiv 2412.06464, equation 10), one stream u for all.

    u    = SiLU(CausalConv(x W_in))            k, q = u W_b, u W_c, rotated; v = u
    Δ    = softplus(u W_dt + dt_bias)          α = exp(−exp(A_log)·Δ)      β = sigmoid(u W_β)
    S_t  = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ       o_t = S_t q_t + D_h v_t
    y    = (RMSNorm_V(o) ⊙ SiLU(u W_g)) W_out + x W_skip

The kernel normalises q and k (a rotation before it changes no norm) and forms α and β from the raw projections.
Shapes: B batch, T sequence, D width, I inner width, H heads, K state (key) width, V = I / H head width.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.interfaces import Aux, Context
from components.kernels.gated_delta_rule.op import gated_delta_rule
from components.kernels.gated_delta_rule.recurrent import gated_delta_rule_step
from components.kernels.short_conv.op import short_conv, short_conv_state, short_conv_step
from components.layers.initial import LINEAR_STD, residual_std
from components.layers.norm import RMSNorm
from components.layers.rotary import rotary_angles, rotate
from components.mixers.cache import RecurrentCache
from components.parameters import Init, Role, constant, log_uniform, normal, rows, uniform, whole
from registry import register

DECAY_HIGH = 16.0  # decay rates A are drawn from (0, 16]
STEP_RANGE = (0.001, 0.1)  # initial step sizes Δ


class Recurrence(nn.Module):
    """The gated delta rule with its per-head scalars A_log, dt_bias and D. o_BTHV comes back in the dtype of v."""

    fp32_unit = True  # a decay near 1 does not survive bf16

    def __init__(self, heads: int, decay_init: str):
        super().__init__()
        self.decay_init = decay_init
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))

    def roles(self) -> dict[str, Role]:
        A_log, dt_bias = DECAY_INITS[self.decay_init]
        inits = {"A_log": A_log, "dt_bias": dt_bias, "D": constant(1.0)}
        return {name: whole("scalar", name, init) for name, init in inits.items()}

    def forward(self, q, k, v, a, b, ctx: Context, cache: RecurrentCache | None) -> tuple[Tensor, Tensor | None]:
        """q, k (B, T, H, K); v (B, T, H, V); a, b (B, T, H). With a cache also the state after the last token."""
        gates = (a, b, self.A_log, self.dt_bias)
        if cache is None:
            o_BTHV, state = gated_delta_rule(q, k, v, *gates, cu_seqlens=ctx.cu_seqlens)
        elif q.shape[1] == 1:
            step = (x[:, 0] for x in (q, k, v, a, b))
            o_BHV, state = gated_delta_rule_step(*step, self.A_log, self.dt_bias, cache.state_BHKV)
            o_BTHV = o_BHV[:, None]
        else:
            o_BTHV, state = gated_delta_rule(q, k, v, *gates, initial_state_BHKV=cache.state_BHKV, return_state=True)
        return (o_BTHV + self.D[:, None] * v).to(v.dtype), state


@register("mixer", "hymo_gdn", example={"inner": 32, "head_dim": 8, "state_dim": 8})
class HymoGDN(nn.Module):
    """Gated delta rule over one convolved stream, with a gated norm, a D skip and a linear skip of the input."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        inner: int  # width I of the stream u, heads × head_dim
        head_dim: int = 32  # value width V of a head
        state_dim: int = 32  # key width K of a head
        conv_width: int = 4  # taps of the causal convolution
        decay_init: Literal["gdn", "arange"] = "gdn"  # A ~ U(0, 16) with small steps, or A = 1..H with Δ = softplus(0)
        rope: bool = True  # rotate at all (false is NoPE)
        rope_on: Literal["qk", "v"] = "qk"  # what rotates
        rotary_fraction: float = 0.25  # share of the head that rotates
        rope_theta: float = 10_000.0  # base of the rotary frequencies
        skip: bool = True  # add x W_skip

        def __post_init__(self):
            if self.inner % self.head_dim:
                raise ValueError(
                    f"head_dim = {self.head_dim} does not divide inner = {self.inner}; "
                    f"nearest that do: {_nearest_divisors(self.inner, self.head_dim)}"
                )
            if not 2 <= self.conv_width <= 4:
                raise ValueError(f"conv_width = {self.conv_width} must be 2, 3 or 4")
            if self.rope and (self.rotary_dim < 2 or self.rotary_dim % 2):
                raise ValueError(
                    f"rotary_fraction = {self.rotary_fraction} of {self.rotated_width} features is "
                    f"{self.rotary_dim}, which must be even and at least 2"
                )

        @property
        def heads(self) -> int:
            return self.inner // self.head_dim

        @property
        def rotated_width(self) -> int:
            return self.state_dim if self.rope_on == "qk" else self.head_dim

        @property
        def rotary_dim(self) -> int:
            return int(self.rotary_fraction * self.rotated_width)

        def _matmul_parameters(self, dim: int) -> int:
            into = self.inner + (dim if self.skip else 0)
            from_u = 2 * self.heads * self.state_dim + self.inner + 2 * self.heads
            return dim * into + self.inner * from_u + self.inner * dim

        def parameters(self, dim: int) -> int:
            return self._matmul_parameters(dim) + self.inner * self.conv_width + 3 * self.heads + self.head_dim

        def active_parameters(self, dim: int) -> int:
            return self.parameters(dim)

        def flops(self, dim: int, seq_len: int) -> dict[str, float]:
            state = 6.0 * self.heads * self.state_dim * self.head_dim  # S k, the rank-1 update, S q
            return {"matmul": 2.0 * self._matmul_parameters(dim), "recurrence": state}

        def cache_numbers(self) -> int:
            """Numbers a token that decoding keeps: none, the state does not grow."""
            return 0

    def __init__(self, config: Config, *, dim: int, layer: int, branches: int):
        super().__init__()
        c = self.config = config
        self.dim, self.out_std = dim, residual_std(branches)
        self.in_skip = nn.Parameter(torch.empty(c.inner + (dim if c.skip else 0), dim))
        self.conv = nn.Parameter(torch.empty(c.inner, c.conv_width))
        self.k_q_gate = nn.Parameter(torch.empty(2 * c.heads * c.state_dim + c.inner, c.inner))
        self.dt_beta = nn.Parameter(torch.empty(2 * c.heads, c.inner))
        self.recurrence = Recurrence(c.heads, c.decay_init)
        self.norm = RMSNorm(RMSNorm.Config(), dim=c.head_dim)
        self.out = nn.Parameter(torch.empty(dim, c.inner))

    def roles(self) -> dict[str, Role]:
        c, linear, out = self.config, normal(LINEAR_STD), normal(self.out_std)
        into = {"in": c.inner, "skip": self.dim} if c.skip else {"in": c.inner}
        from_u = {"b": c.heads * c.state_dim, "c": c.heads * c.state_dim, "g": c.inner}
        bound = c.conv_width**-0.5
        return {
            "in_skip": rows("matrix", into, {"in": linear, "skip": out}),
            "conv": whole("scalar", "conv", uniform(-bound, bound)),
            "k_q_gate": rows("matrix", from_u, linear),
            "dt_beta": rows("matrix", {"dt": c.heads, "beta": c.heads}, linear),
            "out": whole("matrix", "out", out),
        }

    def forward(self, x_BTD: Tensor, ctx: Context, cache: RecurrentCache | None = None) -> tuple[Tensor, Aux]:
        c = self.config
        into = F.linear(x_BTD, self.in_skip)
        u_BTI, conv_BWI = self._convolve(into[..., : c.inner], ctx, cache)
        width = c.heads * c.state_dim
        k, q, gate_BTI = F.linear(u_BTI, self.k_q_gate).split([width, width, c.inner], -1)
        q, k, v = self._rotate(q, k, u_BTI, ctx)
        a_BTH, b_BTH = F.linear(u_BTI, self.dt_beta).chunk(2, -1)
        o_BTHV, state = self.recurrence(q, k, v, a_BTH, b_BTH, ctx, cache)
        if cache is not None:
            cache.advance(state, conv_BWI, x_BTD.shape[1])
        y_BTD = F.linear(self.norm(o_BTHV).flatten(2) * F.silu(gate_BTI), self.out)
        return (y_BTD + into[..., c.inner :] if c.skip else y_BTD), {}

    def _convolve(self, x_BTI: Tensor, ctx: Context, cache: RecurrentCache | None) -> tuple[Tensor, Tensor | None]:
        """The stream u, and with a cache the convolution's next state."""
        if cache is None:
            return short_conv(x_BTI, self.conv, cu_seqlens=ctx.cu_seqlens), None
        if x_BTI.shape[1] == 1:
            u_BI, state = short_conv_step(x_BTI[:, 0], self.conv, cache.conv_BWC)
            return u_BI[:, None], state
        state = short_conv_state(x_BTI, self.config.conv_width, cache.conv_BWC)
        return short_conv(x_BTI, self.conv, state_BWC=cache.conv_BWC), state

    def _rotate(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        q, k, v = (x.unflatten(-1, (c.heads, -1)) for x in (q, k, v))
        if not c.rope:
            return q, k, v
        angles = rotary_angles(ctx.position_BT, c.rotary_dim, c.rope_theta)
        if c.rope_on == "v":
            return q, k, rotate(v, angles)
        return rotate(q, angles), rotate(k, angles), v

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> RecurrentCache:
        c = self.config
        state = torch.zeros(batch, c.heads, c.state_dim, c.head_dim, dtype=torch.float32, device=device)
        conv = torch.zeros(batch, c.conv_width - 1, c.inner, dtype=dtype, device=device)
        return RecurrentCache(state, conv)


def _inverse_softplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))


def _log_of_uniform(values: Tensor, generator: torch.Generator) -> None:
    values.uniform_(0.0, DECAY_HIGH, generator=generator).clamp_(min=1e-4).log_()


def _log_arange(values: Tensor, generator: torch.Generator) -> None:
    values.copy_(torch.arange(1, len(values) + 1)).log_()


DECAY_INITS: dict[str, tuple[Init, Init]] = {  # of A_log and dt_bias
    "gdn": (_log_of_uniform, log_uniform(*STEP_RANGE, _inverse_softplus)),
    "arange": (_log_arange, constant(0.0)),
}


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    nearest = sorted(divisors, key=lambda d: abs(math.log(d / wanted)))[:2]
    return " and ".join(str(d) for d in sorted(nearest))
