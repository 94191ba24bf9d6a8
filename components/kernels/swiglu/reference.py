"""SiLU(gate) ⊙ up, written out. The yardstick of `op.py`. Shapes: F hidden."""

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """(..., 2F) with gate before up, to (..., F)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
