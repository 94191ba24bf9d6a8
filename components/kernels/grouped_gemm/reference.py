"""The slow, obvious mixture of SwiGLU experts: a loop over experts. The yardstick of `op.py`.

Shapes: N tokens, K choices a token, E experts, D width, F hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def mixture_of_swiglu_reference(
    x_ND: Tensor, w13_EDF: Tensor, w2_EFD: Tensor, expert_NK: Tensor, weight_NK: Tensor
) -> Tensor:
    """Σ_k weight · expert(x), each expert W2 (SiLU(W1 x) ⊙ W3 x); weights of 0 drop a choice."""
    y_ND = torch.zeros_like(x_ND)
    for e in range(w13_EDF.shape[0]):
        gate, up = (x_ND @ w13_EDF[e]).chunk(2, -1)
        weight_N = (weight_NK * (expert_NK == e)).sum(-1)
        y_ND = y_ND + weight_N[:, None].to(x_ND.dtype) * ((F.silu(gate) * up) @ w2_EFD[e])
    return y_ND
