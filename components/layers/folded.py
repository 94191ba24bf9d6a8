"""Projections that share a matrix: taking their joint output apart.

Autograd's gradient of a split is a concatenation, and a compiler that fuses it with what made its pieces computes every
piece everywhere, under masks: 0.52 ms for three of 1,280 columns and 16,384 rows, one of them the gradient of a SiLU,
where their bytes take 0.06 on an H200.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def split_last(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of `x` of these widths along the last axis."""
    return _Split.apply(x, tuple(sizes))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return torch.ops.hymo.concatenate_last(gradients), None


@torch.library.custom_op("hymo::concatenate_last", mutates_args=())
def _concatenate_last(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(pieces), -1)


@_concatenate_last.register_fake
def _(pieces):
    return pieces[0].new_empty(*pieces[0].shape[:-1], sum(piece.shape[-1] for piece in pieces))
