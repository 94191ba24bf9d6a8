"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), with or without a learned weight."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.parameters import Role, constant, whole
from registry import register


@register("norm", "rmsnorm", example={})
class RMSNorm(nn.Module):
    """x / RMS(x) over the last axis, times a learned weight (initial value 1) where there is one."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        eps: float = 1e-6  # added to the mean square
        weight: bool = True  # learn a scale for each feature

        def parameters(self, dim: int) -> int:
            return dim if self.weight else 0

    def __init__(self, config: Config, *, dim: int):
        super().__init__()
        self.dim, self.eps = dim, config.eps
        self.weight = nn.Parameter(torch.empty(dim)) if config.weight else None

    def roles(self) -> dict[str, Role]:
        return {} if self.weight is None else {"weight": whole("scalar", "weight", constant(1.0))}

    def forward(self, x: Tensor) -> Tensor:
        """Any shape (..., dim); statistics in fp32, result in the dtype of `x`."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, (self.dim,), weight, self.eps)
