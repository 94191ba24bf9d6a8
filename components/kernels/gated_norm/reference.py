"""RMSNorm(o + D v) ⊙ weight ⊙ SiLU(gate), written out. The yardstick of `op.py`.

Shapes: B rows, T tokens, H heads, V head width, I = H V.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_norm_reference(
    o_BTHV: Tensor,
    gate_BTI: Tensor,
    weight_V: Tensor | None = None,
    *,
    v_BTHV: Tensor | None = None,
    D_H: Tensor | None = None,
    eps: float,
) -> Tensor:
    """y_BTI in the dtype of the gate, computed in float32 (float64 for float64). Gradients come from autograd."""
    wide = torch.promote_types(o_BTHV.dtype, torch.float32)
    x = o_BTHV.to(wide)
    if v_BTHV is not None:
        x = x + D_H.to(wide)[:, None] * v_BTHV.to(wide)
    n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight_V is not None:
        n = n * weight_V.to(wide)
    return (n.flatten(2) * F.silu(gate_BTI.to(wide))).to(gate_BTI.dtype)
