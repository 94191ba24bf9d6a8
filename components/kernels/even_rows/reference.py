"""NorMuon's factors of rows, operation by operation: what runs away from CUDA, and the yardstick of `op.py`."""

import torch
from torch import Tensor

EPS = 1e-10  # far below the root mean square of any row that is alive, about 1/sqrt(max(m, n))


def even_rows_reference(norm_Nm: Tensor, second_moment_Nm: Tensor, columns: int, beta2: float, scale: float) -> Tensor:
    """See `op.even_rows`. fp32 or above."""
    second_moment_Nm.mul_(beta2).addcmul_(norm_Nm, norm_Nm, value=(1 - beta2) / columns)
    even_Nm = second_moment_Nm.sqrt().add_(EPS).reciprocal_()
    before, after = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (norm_Nm, norm_Nm * even_Nm))
    return even_Nm.mul_(before / after.clamp_min_(torch.finfo(after.dtype).tiny)).mul_(scale)
