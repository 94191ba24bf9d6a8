"""Newton-Schulz orthogonalisation of one matrix, step by step: the yardstick of `op.py`. Works in the input's dtype."""

import torch
from torch import Tensor


def newton_schulz_reference(x_mn: Tensor) -> Tensor:
    """Five steps X <- a X + (b A + c A²) X with A = X Xᵀ, from X / ‖X‖_F (Jordan et al. 2024, "Muon").

    Never transposes, so A is (m, m) also where m > n; the result is the same polynomial of the singular values.
    """
    norm = torch.linalg.matrix_norm(x_mn)
    x = x_mn / norm if norm > 0 else x_mn
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x
