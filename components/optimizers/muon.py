"""Muon: momentum, orthogonalised (Jordan et al. 2024). The control for NorMuon, and the optimizer of Chimera."""

from typing import final

import torch
from torch import Tensor

from components.optimizers.bucket import Batch
from components.optimizers.orthogonal import OrthogonalConfig, OrthogonalOptimizer
from registry import register


@register("optimizer", "muon", example={"lr": 0.02})
@final
class Muon(OrthogonalOptimizer):
    """Muon: the orthogonalised momentum itself is the update."""

    Config = OrthogonalConfig

    def row_factors(self, batch: Batch, x_Nmn: Tensor, scale: float) -> Tensor:
        """One factor for all rows: they keep their sizes."""
        return torch.full((len(x_Nmn), 1, 1), scale, dtype=self._wide, device=x_Nmn.device)
