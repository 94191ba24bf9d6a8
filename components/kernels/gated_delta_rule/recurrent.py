"""One token of the gated delta rule, for decoding: state in, state out. No gradient, any device.

Shapes: B rows, H value heads, G query/key heads (H a multiple of G), K key width, V value width.
"""

import torch
from torch import Tensor

from components.kernels.gated_delta_rule.reference import l2_normalise, log_decay


@torch.no_grad()
def gated_delta_rule_step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    a_BH: Tensor,
    b_BH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output o_BHV (dtype of v) and the new state_BHKV (a new tensor, dtype of the old one).

    Takes raw q, k, a, b as `gated_delta_rule` does, computes in the state's dtype.
    """
    wide = state_BHKV.dtype
    q, k, v, a, b, A_log, dt_bias = (x.to(wide) for x in (q_BGK, k_BGK, v_BHV, a_BH, b_BH, A_log_H, dt_bias_H))
    groups = v.shape[1] // q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = l2_normalise(q).repeat_interleave(groups, 1) * scale
    k = l2_normalise(k).repeat_interleave(groups, 1)
    state = log_decay(a, A_log, dt_bias).exp()[..., None, None] * state_BHKV
    error_BHV = b.sigmoid()[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., :, None] * error_BHV[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", q, state).to(v_BHV.dtype), state
