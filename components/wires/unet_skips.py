"""U-Net skips: what leaves a step of the stack's first half joins its mirror image in the second (Auron, part I,
section 3.4; Ronneberger et al., arXiv 1505.04597).

Shapes: B batch, T sequence, D width, S half the steps.
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


@register("wire", "unet_skips")
@final
class UNetSkips(Wire):
    """x += w_s ⊙ skip_s after step n − 1 − s, with a learned vector for each step s of the first half of n. The middle
    one of an odd number of steps has no skip."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        initial: float = 1.0  # every weight at the start

        def parameters(self, dim: int, steps: Sequence[Step]) -> int:
            return len(steps) // 2 * dim

        def check(self, steps: Sequence[Step]) -> str | None:
            return "needs a stack of at least two steps" if len(steps) < 2 else None

    def __init__(self, config: Config, *, dim: int, steps: Sequence[Step]):
        super().__init__()
        self.initial, self.last = config.initial, len(steps) - 1
        self.weight_SD = nn.Parameter(torch.empty(len(steps) // 2, dim))

    def roles(self) -> dict[str, Role]:
        return {"weight_SD": whole("scalar", "weight", constant(self.initial))}

    def after(self, x_BTD: Tensor, step: Step, state: dict[str, Tensor]) -> Tensor:
        mirror = self.last - step.index
        if step.index < len(self.weight_SD):
            state[f"skip {step.index}"] = x_BTD
        elif mirror < len(self.weight_SD):
            return x_BTD + self.weight_SD[mirror] * state.pop(f"skip {mirror}")
        return x_BTD
