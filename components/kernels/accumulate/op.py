"""Gradients of a narrow dtype added to sums in fp32.

Torch's addition of tensors of two dtypes loads value by value and reaches half the memory's rate; a micro-batch of
HyMo adds 1.1 billion values.
"""

import torch
import triton
from torch import Tensor

from components.kernels.accumulate.kernels import add_into

BLOCK = 4096


def accumulate(total: Tensor, values: Tensor) -> None:
    """total += values, in place. `total` fp32; the reference is torch's own `add_`."""
    if total.is_cuda and values.dtype != torch.float32 and total.is_contiguous() and values.is_contiguous():
        launch(total, values)
    else:
        total.add_(values)


def launch(total: Tensor, values: Tensor) -> None:
    """The Triton form, for contiguous tensors."""
    add_into[(triton.cdiv(total.numel(), BLOCK),)](total, values, total.numel(), BLOCK=BLOCK, num_warps=8)
