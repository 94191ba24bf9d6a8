"""Linear projection, softcap and cross-entropy, written out. The yardstick of `op.py`.

Shapes: N positions, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that is not trained


def softcapped_logits(h_ND: Tensor, weight_VD: Tensor, softcap: float) -> Tensor:
    """c·tanh(h Wᵀ / c) in fp32 at least; c = 0 means no cap. Leading axes are free."""
    logits = F.linear(h_ND, weight_VD)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def linear_cross_entropy_reference(h_ND: Tensor, weight_VD: Tensor, target_N: Tensor, softcap: float) -> Tensor:
    """Sum of −log softmax(logits)[target] over targets that are not IGNORE, in nats."""
    logits_NV = softcapped_logits(h_ND, weight_VD, softcap)
    return F.cross_entropy(logits_NV, target_N, ignore_index=IGNORE, reduction="sum")
