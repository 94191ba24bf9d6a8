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
from components.layers.folded import split_last
from components.layers.initial import LINEAR_STD, residual_std
from components.layers.norm import RMSNorm
from components.layers.rotary import angles_in, rotate
from components.mixers.cache import RecurrentCache
from components.mixers.recurrence import Recurrence, RecurrentConfig, convolve, new_recurrent_cache
from components.parameters import Role, normal, rows, uniform, whole
from registry import register


@register("mixer", "hymo_gdn", example={"inner": 32, "head_dim": 8, "state_dim": 8})
class HymoGDN(nn.Module):
    """Gated delta rule over one convolved stream, with a gated norm, a D skip and a linear skip of the input."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
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
            super().__post_init__()

        @property
        def heads(self) -> int:
            return self.inner // self.head_dim

        @property
        def rotated_width(self) -> int:
            return self.state_dim if self.rope_on == "qk" else self.head_dim

        @property
        def rotary_dim(self) -> int:
            return int(self.rotary_fraction * self.rotated_width)

        @property
        def rotation(self) -> tuple[int, float] | None:
            return (self.rotary_dim, self.rope_theta) if self.rope else None

        def turns(self, what: str) -> bool:
            """Whether "qk" or "v" rotate."""
            return self.rope and self.rope_on == what

        @property
        def state_HKV(self) -> tuple[int, int, int]:
            return (self.heads, self.state_dim, self.head_dim)

        def matmul_parameters(self, dim: int) -> int:
            into = self.inner + (dim if self.skip else 0)
            from_u = 2 * self.heads * self.state_dim + self.inner + 2 * self.heads
            return dim * into + self.inner * from_u + self.inner * dim

        def parameters(self, dim: int) -> int:
            return self.matmul_parameters(dim) + self.inner * self.conv_width + 3 * self.heads + self.head_dim

    def __init__(self, config: Config, *, dim: int, layer: int, branches: int):
        super().__init__()
        c = self.config = config
        self.dim, self.out_std = dim, residual_std(branches)
        self.in_skip = nn.Parameter(torch.empty(c.inner + (dim if c.skip else 0), dim))
        self.conv = nn.Parameter(torch.empty(c.inner, c.conv_width))
        self.k_q_gate = nn.Parameter(torch.empty(2 * c.heads * c.state_dim + c.inner, c.inner))
        self.dt_beta = nn.Parameter(torch.empty(2 * c.heads, c.inner))
        self.recurrence = Recurrence(c.heads, c.decay_init, skip=True, chunk=c.chunk)
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
        joint, uses = F.linear(x_BTD, self.in_skip), 3 if c.turns("v") else 4
        u_BTI, same_u_BTI, *values, skip_BTD, conv_BWI = convolve(joint, self.conv, ctx, cache, uses)
        k, q, gate_BTI = self._project(u_BTI, ctx)
        a_BTH, b_BTH = F.linear(same_u_BTI, self.dt_beta).chunk(2, -1)
        v, v_skip = self._values(values, ctx)
        y_BTI, state = self.recurrence(q, k, v, a_BTH, b_BTH, gate_BTI, self.norm, ctx, cache, v_skip)
        if cache is not None:
            cache.advance(state, conv_BWI, x_BTD.shape[1])
        y_BTD = F.linear(y_BTI, self.out)
        return (y_BTD + skip_BTD if c.skip else y_BTD), {}

    def _project(self, u_BTI: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and queries by head, rotated if the recipe says so, and the gate."""
        c = self.config
        joint, width = F.linear(u_BTI, self.k_q_gate), c.heads * c.state_dim
        angles = angles_in(ctx, c.rotation) if c.turns("qk") else None
        k, q, gate_BTI = split_last(joint, (width, width, c.inner), angles, c.state_dim)
        return *(x.unflatten(-1, (c.heads, -1)) for x in (k, q)), gate_BTI

    def _values(self, uses_BTI: list[Tensor], ctx: Context) -> tuple[Tensor, Tensor]:
        """Values by head, for the recurrence and for its skip. Rotated they are one tensor for both."""
        c = self.config
        heads = [u_BTI.unflatten(-1, (c.heads, -1)) for u_BTI in uses_BTI]
        return (rotate(heads[0], angles_in(ctx, c.rotation)),) * 2 if c.turns("v") else tuple(heads)

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> RecurrentCache:
        return new_recurrent_cache(batch, self.config.state_HKV, self.conv, dtype, device)


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    nearest = sorted(divisors, key=lambda d: abs(math.log(d / wanted)))[:2]
    return " and ".join(str(d) for d in sorted(nearest))
