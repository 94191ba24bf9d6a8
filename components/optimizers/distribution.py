"""Which rank orthogonalises which matrix: the plans, by name, and how evenly each spreads the work.

A plan maps the matrices' shapes to their owners, tuples of ranks: one owner, or every rank under `naive`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shape = tuple[int, int]
Owners = list[tuple[int, ...]]


def cost(shape: Shape) -> int:
    """Work of a Newton-Schulz step, up to a constant: m·n·min(m, n)."""
    return math.prod(shape) * min(shape)


def round_robin(shapes: Sequence[Shape], ranks: int) -> Owners:
    """Sorted by size, largest first, and dealt in turn."""
    order = sorted(range(len(shapes)), key=lambda i: -math.prod(shapes[i]))
    owner = {matrix: turn % ranks for turn, matrix in enumerate(order)}
    return [(owner[matrix],) for matrix in range(len(shapes))]


def unsorted(shapes: Sequence[Shape], ranks: int) -> Owners:
    """Dealt in turn in the order of definition: the control for sorting."""
    return [(matrix % ranks,) for matrix in range(len(shapes))]


def balanced(shapes: Sequence[Shape], ranks: int) -> Owners:
    """Largest cost first, each to the rank with the least work so far."""
    loads, owner = [0] * ranks, {}
    for matrix in sorted(range(len(shapes)), key=lambda i: -cost(shapes[i])):
        owner[matrix] = min(range(ranks), key=loads.__getitem__)
        loads[owner[matrix]] += cost(shapes[matrix])
    return [(owner[matrix],) for matrix in range(len(shapes))]


def naive(shapes: Sequence[Shape], ranks: int) -> Owners:
    """Every rank orthogonalises every matrix."""
    return [tuple(range(ranks))] * len(shapes)


PLANS: dict[str, Callable[[Sequence[Shape], int], Owners]] = {
    "round_robin": round_robin,
    "unsorted": unsorted,
    "balanced": balanced,
    "naive": naive,
}


@dataclass(frozen=True)
class LoadReport:
    """How much each rank orthogonalises under a plan, in units of m·n·min(m, n)."""

    distribution: str
    costs: tuple[int, ...]  # by rank

    @property
    def max_over_mean(self) -> float:
        """1 where the load is even; the slowest rank takes this many times the mean."""
        return max(self.costs) * len(self.costs) / sum(self.costs) if any(self.costs) else 1.0


def load_report(distribution: str, shapes: Sequence[Shape], ranks: int) -> LoadReport:
    """The loads of a plan; needs no model and no process group."""
    costs = [0] * ranks
    for shape, owners in zip(shapes, PLANS[distribution](shapes, ranks), strict=True):
        for rank in owners:
            costs[rank] += cost(shape)
    return LoadReport(distribution, tuple(costs))
