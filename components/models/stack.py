"""From zones to a flat list of steps: which physical layer runs when.

A zone is a pattern of block labels, `repeat`ed with new weights and then run `loops` times with the same weights.
Physical layers are numbered over the model in order; steps are what a token passes through, so a looped layer has
several.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Zone:
    """One stretch of the stack."""

    pattern: tuple[str, ...]  # block labels, in order
    repeat: int = 1  # copies of the pattern, each with new weights
    loops: int = 1  # passes through the zone, with the same weights
    share: tuple[str, ...] = ()  # labels of mixers or ffns that the whole zone has once

    def __post_init__(self):
        if not self.pattern:
            raise ValueError("pattern names no block; list at least one label of [model.blocks]")
        if self.repeat < 1 or self.loops < 1:
            raise ValueError(f"repeat = {self.repeat} and loops = {self.loops} must both be at least 1")

    @property
    def layers(self) -> tuple[str, ...]:
        """The block label of each physical layer."""
        return self.pattern * self.repeat


@dataclass(frozen=True)
class Step:
    """One pass of a token through one physical layer."""

    index: int  # virtual: place among all steps
    layer: int  # physical: place among all layers
    zone: str
    place: int  # physical, within the zone
    loop: int
    block: str


def flatten(order: tuple[str, ...], zones: dict[str, Zone]) -> list[Step]:
    """Every step of the stack, in the order of execution."""
    steps: list[Step] = []
    first = 0
    for name in order:
        labels = zones[name].layers
        for loop in range(zones[name].loops):
            for place, label in enumerate(labels):
                steps.append(Step(len(steps), first + place, name, place, loop, label))
        first += len(labels)
    return steps
