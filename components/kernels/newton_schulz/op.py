"""Batched quintic Newton-Schulz: many matrices of one shape, orthogonalised together.

N matrices, m rows, n columns. Each singular value s in (0, 1] is sent through p(s) = a s + b s³ + c s⁵ five times and
lands near 1 (in about [0.7, 1.2]); the coefficients buy speed at s = 0 with that spread.

A step is X <- Q X with Q = a I + b A + c A², A = X Xᵀ. Both A and Q are symmetric: where it pays, half of each is
computed. `a` stands in Q and not beside the last product, which therefore reads nothing but its factors. X is never
divided by its norm n: the first A is divided by n² and the first Q by n, which no pass over X is needed for.

Left out on purpose: other coefficient schedules (Polar Express).
"""

import torch
from torch import Tensor

from components.kernels.newton_schulz import launch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST = 1e-18  # norm that is still made 1: its inverse square is a number in fp32


def newton_schulz(x_Nmn: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices' approximate polar factors, computed and returned in `dtype` (bf16, fp32; fp64 for yardsticks),
    contiguous.

    A zero matrix stays zero. Source: Jordan et al. 2024, "Muon"; the products are taken on the shorter side, so the
    Gram matrices are as small as can be: cost m·n·min(m, n) a step.
    """
    x = x_Nmn.to(dtype).contiguous()
    # The norm in fp32 at least: a sum of squares of bf16 would carry 3 digits.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(dtype, torch.float32))
    inverse = norm.clamp_min_(SMALLEST).reciprocal_()
    tall = x.shape[-2] > x.shape[-1]
    for step in range(STEPS):
        factor = _polynomial(x.mT if tall else x, inverse if step == 0 else None)
        x = torch.bmm(x, factor) if tall else torch.bmm(factor, x)
    return x


def scale(x_NRK: Tensor, factor: Tensor, out_NRK: Tensor) -> Tensor:
    """out = x · factor, which is broadcast, in the dtype of `out` (it may be `x`; both contiguous), multiplied in that
    of `factor`: (N, 1, 1), (N, R, 1) or (N, 1, K)."""
    if x_NRK.is_cuda and factor.dtype == torch.float32:
        return launch.scale(x_NRK, factor, out_NRK)
    return torch.mul(x_NRK, factor, out=out_NRK)


def _polynomial(x_NRK: Tensor, inverse_N11: Tensor | None) -> Tensor:
    """f (a I + b A + c A²) for A = f² x xᵀ, with f = `inverse_N11` or 1."""
    a, b, c = COEFFICIENTS
    square = None if inverse_N11 is None else inverse_N11.square()
    if launch.pays(x_NRK):
        gram = launch.symmetric_product(x_NRK, factor_N11=square)
        return launch.symmetric_product(gram, gram, alpha=c, beta=b, diagonal=a, factor_N11=inverse_N11)
    gram = torch.bmm(x_NRK, x_NRK.mT)
    if square is not None:
        gram.mul_(square)
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor if inverse_N11 is None else factor.mul_(inverse_N11)
