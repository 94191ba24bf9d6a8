"""Causal depthwise convolution as a loop over its taps: the form the kernel is tested against.

Shapes: B rows, T tokens, C channels, W taps; w_CW[:, W - 1] multiplies the token itself.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def short_conv_reference(
    x_BTC: Tensor, w_CW: Tensor, *, position_BT: Tensor | None = None, activation: str | None = "silu"
) -> Tensor:
    """y_BTC in the dtype of x, computed in float32 (float64 for float64). position_BT, int64, restarts at each
    document; without it every row is one. Gradients come from autograd."""
    wide = torch.float64 if x_BTC.dtype == torch.float64 else torch.float32
    x, w = x_BTC.to(wide), w_CW.to(wide)
    if position_BT is None:
        position_BT = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    z = torch.zeros_like(x)
    for back in range(min(w.shape[1], x.shape[1])):
        shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        z = z + torch.where((position_BT >= back)[..., None], shifted, 0) * w[:, -1 - back]
    return (F.silu(z) if activation == "silu" else z).to(x_BTC.dtype)
