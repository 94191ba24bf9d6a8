"""Rotary position embedding (Su et al., arXiv 2104.09864), on the first `rotary_dim` features of a head.

Pairs are (i, i + rotary_dim / 2), the convention of GPT-NeoX and Llama. Shapes: B batch, T sequence, H heads,
R rotary width, K head width.
"""

import torch
from torch import Tensor


def rotary_angles(position_BT: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """position · theta^(−2i/R), fp32 (B, T, R/2)."""
    step = torch.arange(0, rotary_dim, 2, device=position_BT.device, dtype=torch.float32) / rotary_dim
    return position_BT[..., None].float() * theta**-step


def rotate(x_BTHK: Tensor, angles_BTr: Tensor) -> Tensor:
    """`x` with its first 2·r features rotated by `angles`; the rest passes through. Rotates in fp32 at least."""
    rotary_dim = 2 * angles_BTr.shape[-1]
    turned, rest = x_BTHK[..., :rotary_dim], x_BTHK[..., rotary_dim:]
    first, second = turned.to(torch.promote_types(x_BTHK.dtype, torch.float32)).chunk(2, -1)
    cos, sin = angles_BTr.cos()[:, :, None], angles_BTr.sin()[:, :, None]
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([turned.to(x_BTHK.dtype), rest], -1)
