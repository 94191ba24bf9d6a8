"""A router's product and its gradients, written out. The yardstick of `op.py`, and what runs on the CPU.

Shapes: N tokens, D width, E experts.
"""

from torch import Tensor


def product(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """x Wᵀ, (N, E) in the weight's dtype."""
    return x_ND.to(weight_ED.dtype) @ weight_ED.mT


def input_gradient(dy_NE: Tensor, weight_ED: Tensor, dtype) -> Tensor:
    """(N, D) in `dtype`."""
    return (dy_NE @ weight_ED).to(dtype)


def weight_gradient(dy_NE: Tensor, x_ND: Tensor) -> Tensor:
    """(E, D) in the dtype of `dy`."""
    return dy_NE.mT @ x_ND.to(dy_NE.dtype)
