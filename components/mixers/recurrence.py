"""What the mixers with a gated delta rule share: the recurrence with its decays and the gated norm after it, the short
convolution before it, the decode state of both.

Shapes: B batch, T sequence, C channels, H heads, K key width, V value width, W taps;
X = C + S columns of a joint projection.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.interfaces import Context
from components.kernels.gated_delta_rule.forms import check_chunk
from components.kernels.gated_delta_rule.op import gated_delta_rule
from components.kernels.gated_delta_rule.recurrent import gated_delta_rule_step
from components.kernels.gated_norm import gated_norm
from components.kernels.short_conv.op import short_conv, short_conv_beside, short_conv_state, short_conv_step
from components.layers.norm import RMSNorm
from components.mixers.cache import RecurrentCache
from components.parameters import Init, Role, constant, log_uniform, whole

DECAY_HIGH = 16.0  # decay rates A are drawn from (0, 16]
STEP_RANGE = (0.001, 0.1)  # initial step sizes Δ


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(ABC):
    """How a mixer's recurrence is computed, and what the mixer costs."""

    chunk: int = 0  # tokens that the recurrence works on at once; 0: what its kernels were tuned to

    def __post_init__(self):
        _, key_dim, value_dim = self.state_HKV
        check_chunk(key_dim, value_dim, self.chunk)

    @property
    @abstractmethod
    def state_HKV(self) -> tuple[int, int, int]:
        """Heads, and key and value width of a head."""

    @abstractmethod
    def matmul_parameters(self, dim: int) -> int:
        """Of the projections."""

    @abstractmethod
    def parameters(self, dim: int) -> int:
        """All of them."""

    def active_parameters(self, dim: int) -> int:
        return self.parameters(dim)

    def flops(self, dim: int, seq_len: int) -> dict[str, float]:
        heads, key_dim, value_dim = self.state_HKV
        state = 6.0 * heads * key_dim * value_dim  # S k, the rank-1 update, S q, in chunks of whatever size
        return {"matmul": 2.0 * self.matmul_parameters(dim), "recurrence": state}

    def cache_numbers(self) -> int:
        """Numbers a token that decoding keeps: none, the state does not grow."""
        return 0


class Recurrence(nn.Module):
    """The gated delta rule with its per-head scalars A_log, dt_bias and, with `skip`, D (o + D v), then the gated norm,
    which takes in D: a plan may have these scalars whole only while this module runs."""

    fp32_unit = True  # a decay near 1 does not survive bf16

    def __init__(self, heads: int, decay_init: str, skip: bool, chunk: int):
        super().__init__()
        self.decay_init, self.chunk = decay_init, chunk
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads)) if skip else None

    def roles(self) -> dict[str, Role]:
        A_log, dt_bias = DECAY_INITS[self.decay_init]
        inits = {"A_log": A_log, "dt_bias": dt_bias} | ({} if self.D is None else {"D": constant(1.0)})
        return {name: whole("scalar", name, init) for name, init in inits.items()}

    def forward(
        self, q, k, v, a, b, gate, norm: RMSNorm, ctx: Context, cache: RecurrentCache | None,
        v_skip: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """q, k (B, T, H, K); v (B, T, H, V); a, b (B, T, H); gate (B, T, H V). norm(o + D v) ⊙ SiLU(gate), which has
        the gate's shape, and with a cache the state after the last token. `v_skip`, which comes with D, is the v that D
        multiplies: v itself, or what else was handed out of it."""
        o_BTHV, state = self._outputs(q, k, v, a, b, ctx, cache)
        return gated_norm(o_BTHV, gate, norm.weight, v_BTHV=v_skip, D_H=self.D, eps=norm.eps), state

    def _outputs(self, q, k, v, a, b, ctx: Context, cache: RecurrentCache | None) -> tuple[Tensor, Tensor | None]:
        inputs = (q, k, v, a, b, self.A_log, self.dt_bias)
        if cache is None:
            return gated_delta_rule(*inputs, cu_seqlens=ctx.cu_seqlens, chunk=self.chunk)
        if q.shape[1] == 1:
            step = (x[:, 0] for x in (q, k, v, a, b))
            o_BHV, state = gated_delta_rule_step(*step, self.A_log, self.dt_bias, cache.state_BHKV)
            return o_BHV[:, None], state
        return gated_delta_rule(*inputs, initial_state_BHKV=cache.state_BHKV, return_state=True, chunk=self.chunk)


def convolve(
    x_BTX: Tensor, w_CW: Tensor, ctx: Context, cache: RecurrentCache | None, uses: int = 1
) -> tuple[Tensor | None, ...]:
    """SiLU(CausalConv) of the first C columns of x, `uses` times (see `short_conv_beside`), a view of the columns
    beside them, if any, and with a cache the convolution's next state (B, W - 1, C)."""
    if cache is None:
        return *short_conv_beside(x_BTX, w_CW, cu_seqlens=ctx.cu_seqlens, uses=uses), None
    x_BTC, rest_BTS = x_BTX.tensor_split((len(w_CW),), -1)
    if x_BTC.shape[1] == 1:
        u_BC, state = short_conv_step(x_BTC[:, 0], w_CW, cache.conv_BWC)
        return *(u_BC[:, None],) * uses, rest_BTS, state
    state = short_conv_state(x_BTC, w_CW.shape[1], cache.conv_BWC)
    return *(short_conv(x_BTC, w_CW, state_BWC=cache.conv_BWC),) * uses, rest_BTS, state


def new_recurrent_cache(
    batch: int, state_HKV: tuple[int, int, int], w_CW: Tensor, dtype: torch.dtype, device: torch.device
) -> RecurrentCache:
    """Nothing taken in yet: zero states."""
    state = torch.zeros(batch, *state_HKV, dtype=torch.float32, device=device)
    conv = torch.zeros(batch, w_CW.shape[1] - 1, w_CW.shape[0], dtype=dtype, device=device)
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
