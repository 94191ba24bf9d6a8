"""SwiGLU feed-forward (Shazeer, arXiv 2002.05202). Shapes: B batch, T sequence, D width, F hidden."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.interfaces import Aux, Context
from components.kernels.swiglu.op import swiglu
from components.layers.initial import LINEAR_STD, residual_std
from components.parameters import Role, RoleName, normal, rows, whole
from registry import register

ROW_MULTIPLE = 8  # bf16 numbers are 16 bytes: products want rows to start at multiples of that, grouped ones insist


@register("ffn", "swiglu", example={"hidden": 32})
class SwiGLU(nn.Module):
    """W_down (SiLU(W_gate x) ⊙ W_up x), without biases; gate and up are stored as one matrix."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        hidden: int  # width F between the projections

        def __post_init__(self):
            if self.hidden < 1:
                raise ValueError(f"hidden must be at least 1, not {self.hidden}")

        def parameters(self, dim: int) -> int:
            return 3 * dim * self.hidden

        def active_parameters(self, dim: int) -> int:
            return self.parameters(dim)

        def flops(self, dim: int, seq_len: int) -> dict[str, float]:
            return {"matmul": 2.0 * self.parameters(dim)}

    def __init__(self, config: Config, *, dim: int, branches: int, role: RoleName = "matrix"):
        super().__init__()
        self.hidden, self.role, self.out_std = config.hidden, role, residual_std(branches)
        self.gate_up = nn.Parameter(torch.empty(2 * config.hidden, dim))
        self.down = nn.Parameter(torch.empty(dim, config.hidden))

    def roles(self) -> dict[str, Role]:
        sizes = {"gate": self.hidden, "up": self.hidden}
        return {
            "gate_up": rows(self.role, sizes, normal(LINEAR_STD)),
            "down": whole(self.role, "down", normal(self.out_std)),
        }

    def forward(self, x_BTD: Tensor, ctx: Context) -> tuple[Tensor, Aux]:
        gate_up, down = self._aligned()
        return F.linear(swiglu(F.linear(x_BTD, gate_up)), down), {}

    def _aligned(self) -> tuple[Tensor, Tensor]:
        """The weights with zeros up to an aligned width, which add nothing: a width such as int(2.67 D) = 4101 would
        leave every row misaligned."""
        missing = -self.hidden % ROW_MULTIPLE
        if not missing:
            return self.gate_up, self.down
        gate_up = F.pad(self.gate_up.unflatten(0, (2, self.hidden)), (0, 0, 0, missing))
        return gate_up.flatten(0, 1), F.pad(self.down, (0, missing))
