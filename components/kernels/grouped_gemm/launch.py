"""The Triton form, host side: nothing is read from the device, so a CUDA graph can hold the launches."""

import torch
import triton
from torch import Tensor

from components.kernels.grouped_gemm import kernels

HIGH, WIDE, DEEP, WARPS, STAGES = 128, 64, 16, 8, 3  # a result's tile, and the length multiplied at a time


def product(rows_MP: Tensor, weight_EPQ: Tensor, ends_E: Tensor) -> Tensor:
    """As in `eager.py`. An expert's last tile may be partly empty, so there are up to E tiles more than rows fill."""
    (M, P), (E, _, Q) = rows_MP.shape, weight_EPQ.shape
    y_MQ = rows_MP.new_empty(M, Q)
    kernels.grouped_product[((triton.cdiv(M, HIGH) + E) * triton.cdiv(Q, WIDE),)](
        rows_MP.contiguous(),
        weight_EPQ,
        y_MQ,
        ends_E,
        E,
        P,
        Q,
        *weight_EPQ.stride(),
        PRECISION=_precision(),
        BE=triton.next_power_of_2(E),
        BM=HIGH,
        BP=DEEP,
        BQ=WIDE,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return y_MQ


def weight_gradient(rows_MP: Tensor, dy_MQ: Tensor, ends_E: Tensor) -> Tensor:
    """As in `eager.py`."""
    E, P, Q = len(ends_E), rows_MP.shape[1], dy_MQ.shape[1]
    dweight_EPQ = rows_MP.new_empty(E, P, Q)
    kernels.grouped_weight_gradient[(E * triton.cdiv(P, HIGH) * triton.cdiv(Q, WIDE),)](
        rows_MP.contiguous(),
        dy_MQ.contiguous(),
        dweight_EPQ,
        ends_E,
        P,
        Q,
        PRECISION=_precision(),
        BM=DEEP,
        BP=HIGH,
        BQ=WIDE,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return dweight_EPQ


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
