"""Batched quintic Newton-Schulz: many matrices of one shape, orthogonalised together.

N matrices, m rows, n columns. Each singular value s in (0, 1] is sent through p(s) = a s + b s³ + c s⁵ five times and
lands near 1 (in about [0.7, 1.2]); the coefficients buy speed at s = 0 with that spread.

Left out on purpose: a kernel that uses the symmetry of A, and other coefficient schedules (Polar Express).
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def newton_schulz(x_Nmn: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices' approximate polar factors, computed and returned in `dtype` (bf16, fp32; fp64 for yardsticks).

    A zero matrix stays zero. Source: Jordan et al. 2024, "Muon"; the shorter side is made the rows, so the Gram
    matrices are as small as can be: cost m·n·min(m, n) a step.
    """
    tall = x_Nmn.shape[-2] > x_Nmn.shape[-1]
    x = (x_Nmn.mT if tall else x_Nmn).to(dtype)
    # The norm in fp32 at least: a sum of squares of bf16 would carry 3 digits.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(dtype, torch.float32))
    x = x / norm.clamp_min(torch.finfo(torch.float32).tiny).to(dtype)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
