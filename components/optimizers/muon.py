"""Muon: momentum, orthogonalised (Jordan et al. 2024). The control for NorMuon, and the optimizer of Chimera."""

from dataclasses import dataclass

from torch import Tensor

from components.optimizers.orthogonal import OrthogonalConfig, OrthogonalOptimizer
from registry import register


@register("optimizer", "muon", example={"lr": 0.02})
class Muon(OrthogonalOptimizer):
    """Muon: the orthogonalised momentum itself is the update."""

    @dataclass(frozen=True, kw_only=True)
    class Config(OrthogonalConfig):
        pass

    def normalise(self, position: int, x_Nmn: Tensor) -> Tensor:
        """Unchanged."""
        return x_Nmn
