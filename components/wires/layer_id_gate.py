"""Layer IDs: a learned vector for each pass through each layer of a looped zone, so that equal weights can do unequal
work (Auron, part I, section 3.4).

They join the normed input of the chosen blocks' mixers, where they steer the gates of a recurrence, and not the
residual stream, whose variance they would raise for the attention layers. Into the stream is the ablation.
Shapes: B batch, T sequence, D width, L loops, P layers of the zone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from components.models.stack import Step
from components.parameters import Role, constant, whole
from components.wires.base import Wire
from registry import register, unknown


@register("wire", "layer_id_gate", example={"zone": "trunk", "blocks": ["gdn"]})
@final
class LayerIDGate(Wire):
    """One vector for each loop and layer of a zone, initially 0. Layers of other blocks have one that nothing reads."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        zone: str  # label of the zone
        blocks: tuple[str, ...]  # labels of the blocks that are told which layer they are; those with a recurrence
        into: Literal["mixer", "residual"] = "mixer"  # the mixer's normed input, or the stream before the block

        def parameters(self, dim: int, steps: Sequence[Step]) -> int:
            loops, places = _shape(steps, self.zone)
            return loops * places * dim

        def check(self, steps: Sequence[Step]) -> str | None:
            zones = {step.zone for step in steps}
            if self.zone not in zones:
                return unknown("zone in order", self.zone, zones)
            blocks = {step.block for step in steps if step.zone == self.zone}
            missing = [label for label in self.blocks if label not in blocks]
            return unknown(f"block in zone {self.zone}", missing[0], blocks) if missing else None

    def __init__(self, config: Config, *, dim: int, steps: Sequence[Step]):
        super().__init__()
        self.config = config
        self.id_LPD = nn.Parameter(torch.empty(*_shape(steps, config.zone), dim))

    def roles(self) -> dict[str, Role]:
        return {"id_LPD": whole("scalar", "id", constant(0.0))}

    def before(self, x_BTD: Tensor, step: Step, state: dict[str, Tensor]) -> Tensor:
        id_D = self._id(step, "residual")
        return x_BTD if id_D is None else x_BTD + id_D

    def mixer_input(self, step: Step) -> Tensor | None:
        return self._id(step, "mixer")

    def _id(self, step: Step, into: str) -> Tensor | None:
        c = self.config
        told = c.into == into and step.zone == c.zone and step.block in c.blocks
        return self.id_LPD[step.loop, step.place] if told else None


def _shape(steps: Sequence[Step], zone: str) -> tuple[int, int]:
    """Loops and layers of a zone."""
    inside = [step for step in steps if step.zone == zone]
    return 1 + max(step.loop for step in inside), 1 + max(step.place for step in inside)
