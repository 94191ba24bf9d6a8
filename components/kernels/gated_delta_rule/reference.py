"""The gated delta rule token by token: the slow, obvious form every other form is tested against.

    k, q = k / |k|, scale * q / |q|          |x| = sqrt(sum x^2 + 1e-6)
    alpha = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
    S <- alpha (I - beta k k^T) S + beta k v^T,   o = S^T q

Shapes: B rows, T tokens, H value heads, G query/key heads (H a multiple of G), K key width, V value width. The state
is kept K by V. Gradients come from autograd. Left out on purpose: packed documents; call it once a document.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, equation 10.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

NORM_EPS = 1e-6
LOG_DECAY_FLOOR = -80.0  # exp(-80) is zero beside 1 in every dtype, and a sum of 4096 of them still is a number


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def l2_normalise(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def log_decay(a: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> Tensor:
    """log alpha = -exp(A_log) * softplus(a + dt_bias), not below `LOG_DECAY_FLOOR`; heads on the last axis."""
    return (-A_log_H.exp() * F.softplus(a + dt_bias_H)).clamp(min=LOG_DECAY_FLOOR)


def gated_delta_rule_reference(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    scale: float | None = None,
    initial_state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs o_BTHV in the dtype of v, and the last state_BHKV; computed in float32 (float64 for float64 inputs)."""
    wide = state_dtype(v_BTHV.dtype)
    q, k, v, a, b, A_log, dt_bias = (x.to(wide) for x in (q_BTGK, k_BTGK, v_BTHV, a_BTH, b_BTH, A_log_H, dt_bias_H))
    groups = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = l2_normalise(q).repeat_interleave(groups, 2) * scale
    k = l2_normalise(k).repeat_interleave(groups, 2)
    alpha, beta = log_decay(a, A_log, dt_bias).exp(), b.sigmoid()
    state = q.new_zeros(*v.shape[::2], k.shape[-1], v.shape[-1]) if initial_state_BHKV is None else initial_state_BHKV
    outputs = []
    for t in range(v.shape[1]):
        state = alpha[:, t, :, None, None] * state
        error_BHV = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", beta[:, t, :, None] * k[:, t], error_BHV)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1).to(v_BTHV.dtype), state
