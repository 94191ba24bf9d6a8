"""The rotation in PyTorch, and the gradient of a joint projection piece by piece: the yardstick of `op.py`.

Shapes: B batch, T sequence, H heads, K head width, r pairs that rotate.
"""

import torch
from torch import Tensor


def turn(x_BTHK: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
    """`x` with its pairs of features (i, i + r), i < r, rotated, in fp32 at least; the rest passes through."""
    rotary_dim = 2 * cos_BTr.shape[-1]
    turned, rest = x_BTHK[..., :rotary_dim], x_BTHK[..., rotary_dim:]
    first, second = turned.to(torch.promote_types(x_BTHK.dtype, torch.float32)).chunk(2, -1)
    cos, sin = cos_BTr[:, :, None], sin_BTr[:, :, None]
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([turned.to(x_BTHK.dtype), rest], -1)


def joint_gradient_reference(
    first: Tensor, second: Tensor, third: Tensor, cos_BTr: Tensor | None, sin_BTr: Tensor | None, head_dim: int
) -> Tensor:
    """See `op.joint_gradient`."""
    if cos_BTr is not None:
        heads = (x.unflatten(-1, (-1, head_dim)) for x in (first, second))
        first, second = (turn(x_BTHK, cos_BTr, -sin_BTr).flatten(2) for x_BTHK in heads)
    return torch.cat([first, second, third], -1)
