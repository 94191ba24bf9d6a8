"""NorMuon: Muon whose update has rows of even size (arXiv 2510.05491).

Departures from the paper, both by specification: the update keeps the Frobenius norm that Newton-Schulz gave it,
where the paper sets its RMS to 0.2 (`scale = "rms"` comes to the same for an orthogonal matrix), and weight decay
may be cautious. The second moment starts at zero and is not bias-corrected, as in the paper: all rows of a matrix have
the same age, so the correction is one factor and the rescaling takes it out again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from components.kernels.even_rows.op import even_rows
from components.optimizers.base import StateView
from components.optimizers.bucket import Batch
from components.optimizers.orthogonal import OrthogonalConfig, OrthogonalOptimizer
from components.parameters import LogicalView, OwnedParameter
from registry import register


@register("optimizer", "normuon", example={"lr": 0.02})
@final
class NorMuon(OrthogonalOptimizer):
    """NorMuon: orthogonalised momentum, each output neuron's row divided by its running RMS.

    The row statistic of a matrix is kept by its owner only.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(OrthogonalConfig):
        beta2: float = 0.95  # decay of the moving mean square of each row
        weight_decay: float = 0.1  # decoupled: lr * weight_decay of the weight a step
        cautious: bool = True  # decay only where update and weight agree in sign

        def __post_init__(self):
            super().__post_init__()
            if not 0 <= self.beta2 < 1:
                raise ValueError(f"beta2 must lie in [0, 1), not {self.beta2}")

    def __init__(self, config: Config, *, parameters: Sequence[OwnedParameter]):
        super().__init__(config, parameters=parameters)
        self.row_second_moment = {
            b: torch.zeros(len(b.mine), b.oriented[0], dtype=self._wide, device=self._device) for b in self.batches
        }

    def row_factors(self, batch: Batch, x_Nmn: Tensor, scale: float) -> Tensor:
        """One over the root of each row's second moment, times what gives the matrix back the Frobenius norm it came
        with. Both norms follow from those of the rows."""
        norm_Nm = torch.linalg.vector_norm(x_Nmn, dim=-1, dtype=self._wide)
        second_moment_Nm = self.row_second_moment[batch]
        return even_rows(norm_Nm, second_moment_Nm, x_Nmn.shape[-1], self.config.beta2, scale)[..., None]

    def state_views(self) -> Iterator[StateView]:
        yield from super().state_views()
        for batch, second_moment_Nm in self.row_second_moment.items():
            for matrix, row_m in zip(batch.mine.values(), second_moment_Nm, strict=True):
                yield "row_second_moment", LogicalView(matrix.name, tuple(row_m.shape), (0,), row_m)
