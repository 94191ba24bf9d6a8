"""The symmetric product in Triton, host side."""

import torch
import triton
from torch import Tensor

from components.kernels.newton_schulz import kernels

TILE, COLUMNS, WARPS, STAGES = 128, 64, 8, 3
REGISTERS = 128  # of a thread: two programs fit an SM, and nothing spills


def symmetric_product(
    x_NRK: Tensor, added_NRR: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """alpha x xᵀ + beta added + diagonal I in the dtype of x, summed in fp32. `added` is symmetric and contiguous."""
    N, R, K = x_NRK.shape
    out = x_NRK.new_empty(N, R, R)
    across = triton.cdiv(R, TILE)
    tiles = across * (across + 1) // 2
    kernels.symmetric_product[(N * tiles,)](
        x_NRK,
        x_NRK if added_NRR is None else added_NRR,
        out,
        R,
        K,
        *x_NRK.stride(),
        tiles,
        float(alpha),
        float(beta),
        float(diagonal),
        ADD=added_NRR is not None,
        WHOLE=R % TILE == 0 and K % COLUMNS == 0,
        TILE=TILE,
        BK=COLUMNS,
        num_warps=WARPS,
        num_stages=STAGES,
        maxnreg=REGISTERS,
    )
    return out


def pays(x_NRK: Tensor) -> bool:
    """Whether the kernel beats cuBLAS, which makes both halves: on enough whole tiles of bf16."""
    on_cuda = x_NRK.device.type == "cuda" and x_NRK.dtype == torch.bfloat16
    return on_cuda and x_NRK.shape[1] >= 512
