"""Rotary position embedding (Su et al., arXiv 2104.09864), on the first `rotary_dim` features of a head.

Pairs are (i, i + rotary_dim / 2), the convention of GPT-NeoX and Llama. A rotation is orthogonal, so its gradient is
the rotation back: written out, because a compiler that derives it from slices and concatenations makes it six times as
slow. Shapes: B batch, T sequence, H heads, R rotary width, r = R/2, K head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from components.interfaces import Context
from components.kernels.rotation import turn


class Angles(NamedTuple):
    """Cosines and sines of the angles by which each position turns each pair, fp32 (B, T, r). No gradient."""

    cos_BTr: Tensor
    sin_BTr: Tensor


def rotary_angles(position_BT: Tensor, rotary_dim: int, theta: float) -> Angles:
    """Of position · theta^(−2i/R)."""
    step = torch.arange(0, rotary_dim, 2, device=position_BT.device, dtype=torch.float32) / rotary_dim
    angles_BTr = position_BT[..., None].float() * theta**-step
    return Angles(angles_BTr.cos(), angles_BTr.sin())


def angles_in(ctx: Context, rotation: tuple[int, float]) -> Angles:
    """The angles of `rotation` = (rotary_dim, theta): what the model has computed for all its layers, else computed."""
    known = ctx.angles.get(rotation)
    return rotary_angles(ctx.position_BT, *rotation) if known is None else known


def rotate(x_BTHK: Tensor, angles: Angles) -> Tensor:
    """`x` with its first 2·r features rotated by `angles`; the rest passes through. Rotates in fp32 at least."""
    return _Rotation.apply(x_BTHK, *angles)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTHK: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTr, sin_BTr)
        return turn(x_BTHK, cos_BTr, sin_BTr)

    @staticmethod
    def backward(ctx, grad_BTHK: Tensor):
        cos_BTr, sin_BTr = ctx.saved_tensors
        return turn(grad_BTHK, cos_BTr, -sin_BTr), None, None
