"""What NorMuon multiplies each row with, from the norms of the rows: a dozen small kernels as one on CUDA.

Shapes: N matrices of m rows.
"""

import torch
import triton
from torch import Tensor

from components.kernels.even_rows.kernels import even_rows as kernel
from components.kernels.even_rows.reference import EPS, even_rows_reference

MOST_ROWS = 2**14  # that one program holds


def even_rows(norm_Nm: Tensor, second_moment_Nm: Tensor, columns: int, beta2: float, scale: float) -> Tensor:
    """The factor of each row, (N, m): one over the root of its second moment, times what leaves the matrix its
    Frobenius norm, times `scale`.

    norm_Nm: of rows with `columns` elements. second_moment_Nm, the running mean of their squares, takes the norms in,
    in place. Both are contiguous and of one dtype, fp32 or above, which the factors have too. Source: NorMuon (arXiv
    2510.05491), where the norm kept is another (docs/optimizers.md).
    """
    if norm_Nm.is_cuda and norm_Nm.dtype == torch.float32 and norm_Nm.shape[1] <= MOST_ROWS:
        return launch(norm_Nm, second_moment_Nm, columns, beta2, scale)
    return even_rows_reference(norm_Nm, second_moment_Nm, columns, beta2, scale)


def launch(norm_Nm: Tensor, second_moment_Nm: Tensor, columns: int, beta2: float, scale: float) -> Tensor:
    """The Triton form: fp32, contiguous."""
    factor_Nm, (N, m) = torch.empty_like(norm_Nm), norm_Nm.shape
    added, tiny = (1 - beta2) / columns, torch.finfo(torch.float32).tiny
    block = triton.next_power_of_2(m)
    kernel[(N,)](norm_Nm, second_moment_Nm, factor_Nm, m, beta2, added, scale, EPS, tiny, BLOCK=block, num_warps=8)
    return factor_Nm
