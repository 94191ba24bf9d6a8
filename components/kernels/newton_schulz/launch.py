"""The symmetric product and the scaling in Triton, host side. Sizes of tiles were swept on an H200."""

import torch
import triton
from torch import Tensor

from components.kernels.newton_schulz import kernels

HIGH, WIDE, COLUMNS, WARPS, STAGES = 128, 1, 64, 8, 3
REGISTERS = 128  # of a thread: two programs fit an SM, and nothing spills
SCALED = (16, 256)  # rows and columns that a program scales


def symmetric_product(
    x_NRK: Tensor,
    added_NRR: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    factor_N11: Tensor | None = None,
) -> Tensor:
    """factor (alpha x xᵀ + beta added + diagonal I) in the dtype of x, summed in fp32. `added` is symmetric and
    contiguous, `factor` fp32."""
    N, R, K = x_NRK.shape
    out = x_NRK.new_empty(N, R, R)
    across = triton.cdiv(R, HIGH * WIDE)
    tiles = WIDE * across * (across + 1) // 2
    kernels.symmetric_product[(N * tiles,)](
        x_NRK,
        x_NRK if added_NRR is None else added_NRR,
        x_NRK if factor_N11 is None else factor_N11,
        out,
        R,
        K,
        *x_NRK.stride(),
        tiles,
        float(alpha),
        float(beta),
        float(diagonal),
        ADD=added_NRR is not None,
        SCALE=factor_N11 is not None,
        WHOLE=R % (HIGH * WIDE) == 0 and K % COLUMNS == 0,
        HIGH=HIGH,
        WIDE=WIDE,
        BK=COLUMNS,
        num_warps=WARPS,
        num_stages=STAGES,
        maxnreg=REGISTERS,
    )
    return out


def scale(x_NRK: Tensor, factor: Tensor, out_NRK: Tensor) -> Tensor:
    """out = x · factor in the dtype of `out`, multiplied in that of `factor`: (N, 1, 1), (N, R, 1) or (N, 1, K), fp32.
    `x` and `out`, which may be `x`, are contiguous."""
    (N, R, K), (rows, columns) = x_NRK.shape, SCALED
    by_column = factor.shape[2] > 1
    kernels.scale[(N * triton.cdiv(R, rows) * triton.cdiv(K, columns),)](
        x_NRK,
        factor,
        out_NRK,
        R,
        K,
        factor.stride(0),
        factor.expand(N, R, K).stride(2 if by_column else 1),
        BY_COLUMN=by_column,
        BR=rows,
        BK=columns,
    )
    return out_NRK


def pays(x_NRK: Tensor) -> bool:
    """Whether the symmetric product beats cuBLAS, which makes both halves: in bf16, on enough tiles."""
    return x_NRK.is_cuda and x_NRK.dtype == torch.bfloat16 and x_NRK.shape[1] >= 512
