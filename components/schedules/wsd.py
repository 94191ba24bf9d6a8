"""Learning-rate schedules: one factor for every optimizer group, so that the ratio of their rates never changes.

`factor(step, steps)` is for the update number `step` (0-based) of `steps`. The first update already moves (factor
1/warm-up) and the last one is made at exactly the final factor.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from registry import register

# How far the decay has come down, by how much of it is done (0 to 1).
_DECAYED = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 - 0.5 * math.cos(math.pi * progress),
    "sqrt": math.sqrt,
}


@register("schedule", "wsd", example={"warmup_ratio": 0.02, "decay_ratio": 0.15, "min_lr_factor": 0.05})
@final
class WSD:
    """Warm-up, stable, decay: linear rise to 1, then 1, then down to `min_lr_factor`.

    Decay shapes: linear; cosine; sqrt, which is 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392). In a run too short
    for both, warm-up and decay overlap and the lower one holds.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        warmup_ratio: float | None = None  # part of all steps; this or warmup_steps
        warmup_steps: int | None = None  # number of steps
        decay_ratio: float = 0.15  # part of all steps
        decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
        min_lr_factor: float = 0.0  # the factor of the last step

        def __post_init__(self):
            if (self.warmup_ratio is None) == (self.warmup_steps is None):
                raise ValueError("give either warmup_ratio or warmup_steps (state `name` again to drop a parent's)")
            if self.warmup_steps is not None and self.warmup_steps < 0:
                raise ValueError(f"warmup_steps must be 0 or more, not {self.warmup_steps}")
            for name in ("warmup_ratio", "decay_ratio", "min_lr_factor"):
                value = getattr(self, name)
                if value is not None and not 0 <= value <= 1:
                    raise ValueError(f"{name} must lie in [0, 1], not {value}")
            if (self.warmup_ratio or 0) + self.decay_ratio > 1:
                raise ValueError("warmup_ratio and decay_ratio add up to more than 1; lower one of them")

    def __init__(self, config: Config):
        self.config = config

    def phases(self, steps: int) -> tuple[int, int, int]:
        """Steps of warm-up, stable and decay in a run of `steps`."""
        ratio, warmup = self.config.warmup_ratio, self.config.warmup_steps
        warmup = round(ratio * steps) if warmup is None else warmup
        decay = round(self.config.decay_ratio * steps)
        return warmup, max(0, steps - warmup - decay), decay

    def factor(self, step: int, steps: int) -> float:
        """The factor on every learning rate for update `step` (0-based) of `steps`."""
        c = self.config
        warmup, _, decay = self.phases(steps)
        into_decay = step + 1 - (steps - decay)
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        if into_decay <= 0:
            return rise
        return min(rise, 1.0 - (1.0 - c.min_lr_factor) * _DECAYED[c.decay_type](min(1.0, into_decay / decay)))


@register("schedule", "constant")
@final
class Constant:
    """The configured rates at every step."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config):
        self.config = config

    def factor(self, step: int, steps: int) -> float:
        """Always 1."""
        return 1.0
