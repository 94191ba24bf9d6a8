"""x0 injection: the stack's input, scaled, joins the residual stream before every step (Auron, part I, section 3.4).

Shapes: B batch, T sequence, D width, S steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from components.models.stack import Step
from components.parameters import Role, constant, whole
from components.wires.base import Wire
from registry import register


@register("wire", "x0_injection")
@final
class X0Injection(Wire):
    """x += λ_s x0 before step s, with a learned λ for each step; x0 is the embedding, normed where it is normed."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        initial: float = 0.0  # every λ at the start

        def parameters(self, dim: int, steps: Sequence[Step]) -> int:
            return len(steps)

    def __init__(self, config: Config, *, dim: int, steps: Sequence[Step]):
        super().__init__()
        self.initial = config.initial
        self.scale_S = nn.Parameter(torch.empty(len(steps)))

    def roles(self) -> dict[str, Role]:
        return {"scale_S": whole("scalar", "scale", constant(self.initial))}

    def before(self, x_BTD: Tensor, step: Step, state: dict[str, Tensor]) -> Tensor:
        return x_BTD + self.scale_S[step.index] * state.setdefault("x0", x_BTD)
