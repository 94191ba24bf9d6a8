"""Means, paired differences and what may be said of them. Intervals are Student's t at 95%, over seeds.

Pairing: runs of equal seed saw the same batches in the same order and began with the same weights where both have
them, so that their difference is steadier than either. A difference whose interval holds 0 is not separated; with one
seed there is no interval and nothing is said. Intervals of several variants are not corrected for their number.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

CONFIDENCE = 0.95

Verdict = Literal["better", "worse", "not separated", "one seed"]
Judgement = Literal["met", "refuted", "not settled"]


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval; None for a single number."""

    mean: float
    half: float | None

    @property
    def low(self) -> float:
        return self.mean - (math.inf if self.half is None else self.half)

    @property
    def high(self) -> float:
        return self.mean + (math.inf if self.half is None else self.half)


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value, with its 95% interval if there are two."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Interval(mean, None)
    return Interval(mean, t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n))


def paired(variant: dict[int, float], reference: dict[int, float]) -> Interval | None:
    """The difference variant - reference over the seeds that both have; None if there is none."""
    seeds = sorted(set(variant) & set(reference))
    return interval([variant[s] - reference[s] for s in seeds]) if seeds else None


def verdict(difference: Interval) -> Verdict:
    """Of a quantity that is better when it is lower."""
    if difference.half is None:
        return "one seed"
    if difference.high < 0:
        return "better"
    return "worse" if difference.low > 0 else "not separated"


def judgement(difference: Interval, at_least: float | None, at_most: float | None) -> Judgement | None:
    """Whether a difference keeps the bound that a claim states: all of its interval does, none of it does, or it lies
    across. None where no bound is stated."""
    if at_least is None and at_most is None:
        return None
    # below the bound is what `at_least` forbids; for `at_most` everything is mirrored
    bound = at_least if at_least is not None else -at_most
    low, high = (difference.low, difference.high) if at_least is not None else (-difference.high, -difference.low)
    if low >= bound:
        return "met"
    return "refuted" if high < bound else "not settled"


@cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t that a Student variable of `degrees` stays within, both sides, with this probability; by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """P(|T| < t), exact for whole degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    odd, square = degrees % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(odd + 1, degrees, 2):  # 2, 4, … below odd degrees; 1, 3, … below even ones
        total += term
        term *= square * k / (k + 1)
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
