"""Make a variant as large as its reference by one named number of its recipe, at whatever scale both are."""

import copy
import typing
from collections.abc import Callable
from typing import Any

import registry
from recipes.ablate.family import Match, Quantity
from recipes.job import Job, to_table
from registry import Problem, RecipeError

Table = dict[str, Any]


def size(job: Job, quantity: Quantity) -> float:
    """A job's parameters (stored, or that a token uses), training FLOPs a token, physical layers or tokens."""
    config, training = job.model.config, job.training
    if quantity == "tokens":
        return training.steps * training.tokens_per_step
    if quantity == "layers":
        return len({step.layer for step in config.steps()})
    if quantity == "flops":
        return sum(config.flops_per_token(training.seq_len).values())
    stored, active = (sum(column) for column in zip(*config.parameter_table().values(), strict=True))
    return active if quantity == "active_parameters" else stored


def matched(job: Job, match: Match, reference: Job) -> tuple[int, str]:
    """The value of `match.key` that brings `job` nearest to the reference, and a sentence that says so.

    Takes for granted that the quantity grows with the number. ValueError where no value comes near (a factor of 2).
    """
    table, target = to_table(job), match.factor * size(reference, match.quantity)

    def reached(units: int) -> float:
        return size(_edited(table, match.key, units * match.multiple_of), match.quantity)

    units = _nearest(reached, target)
    value, got = units * match.multiple_of, reached(units)
    if not 0.5 < got / target < 2:
        raise ValueError(f"{match.key} cannot match {match.quantity}: {value} gives {got:,.0f}, wanted {target:,.0f}")
    return value, f"{match.key} = {value}: {got:,.0f} {match.quantity.replace('_', ' ')}, the aim was {target:,.0f}"


def _nearest(reached: Callable[[int], float], target: float) -> int:
    """The positive integer whose value comes nearest to `target`, by bisection."""
    low, high = 1, 2
    while reached(high) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reached(middle) < target else (low, middle)
    return min(low, high, key=lambda units: abs(reached(units) - target))


def _edited(table: Table, key: str, value: int) -> Job:
    """The job with one number changed."""
    table = copy.deepcopy(table)
    inner, *path = table, *key.split(".")
    for part in path[:-1]:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or path[-1] not in inner:
        raise ValueError(f"there is no {key} in the variant's recipe to match with")
    inner[path[-1]] = value
    problems: list[Problem] = []
    hints = typing.get_type_hints(Job, include_extras=True)
    sections = {name: registry.parse(hints[name], table.get(name, {}), (name,), problems) for name in hints}
    if problems:
        raise RecipeError(problems)
    return Job(**sections)
