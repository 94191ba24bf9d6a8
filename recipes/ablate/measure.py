"""What a report says of one run, by name, from its result file alone: readings of the held-out loss, and columns.

Readings lie between validations, linearly. Under a schedule that decays, a run read before its end has not decayed
yet: at equal FLOPs or time only the cheapest variant is read at its own end.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from recipes.result import Result

AXES = ("tokens", "FLOPs", "seconds")
ROUNDING = 1e-9  # relative, of a place on an axis


def position(result: Result, axis: str, tokens: float) -> float:
    """Where a run stands on an axis after so many tokens."""
    if axis == "FLOPs":
        return tokens * result["flops_per_token"]["total"]
    return tokens if axis == "tokens" else tokens / _tokens_per_step(result) * result["step_seconds"]


def _tokens_per_step(result: Result) -> int:
    training = result["recipe"]["training"]
    return training["global_batch_size"] * training["seq_len"]


def curve(result: Result, axis: str, key: str = "validation/loss") -> tuple[list[float], list[float]]:
    """A validation value along an axis."""
    lines = [line for line in result["validations"] if line.get(key) is not None]
    return [position(result, axis, line["tokens"]) for line in lines], [line[key] for line in lines]


def common_end(results: Sequence[Result], axis: str) -> float:
    """The farthest that every run came."""
    return min(position(result, axis, result["tokens"]) for result in results)


def reading(result: Result, axis: str, at: float, key: str = "validation/loss") -> float | None:
    """A validation value at one place of an axis; None before the first validation, after the last, or without any."""
    x, y = curve(result, axis, key)
    if not x or not x[0] * (1 - ROUNDING) <= at <= x[-1] * (1 + ROUNDING):
        return None
    for (x0, y0), (x1, y1) in zip(zip(x, y, strict=True), zip(x[1:], y[1:], strict=True), strict=False):
        if at < x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return y[-1]


def _mean_over_layers(ending: str) -> Callable[[Result], float | None]:
    def measure(result: Result) -> float | None:
        found = [v["mean"] for key, v in result["summary"].items() if key.startswith("moe/") and key.endswith(ending)]
        return statistics.fmean(found) if found else None

    return measure


def _summary(key: str, statistic: str) -> Callable[[Result], float | None]:
    return lambda result: result["summary"][key][statistic] if key in result["summary"] else None


def _by_depth(prefix: str) -> Callable[[Result], dict[str, float]]:
    def measure(result: Result) -> dict[str, float]:
        last = result["validations"][-1] if result["validations"] else {}
        return {key.removeprefix(prefix): v for key, v in last.items() if key.startswith(prefix) and v is not None}

    return measure


def _by_length(value: str) -> Callable[[Result], dict[str, float]]:
    """The last validation's value at every length beside the training's."""
    start, end = "validation/at_", f"/{value}"

    def measure(result: Result) -> dict[str, float]:
        last = result["validations"][-1] if result["validations"] else {}
        known = [key for key in last if key.startswith(start) and key.endswith(end) and last[key] is not None]
        return {key.removeprefix(start).removesuffix(end): last[key] for key in known}

    return measure


def _by_rank(name: str) -> Callable[[Result], dict[str, float]]:
    """Median milliseconds of a part of the optimizer step, by rank."""
    start = f"time/{name}/"

    def measure(result: Result) -> dict[str, float]:
        summary = result["summary"]
        return {key.removeprefix(start): 1e3 * summary[key]["median"] for key in summary if key.startswith(start)}

    return measure


def _slowest_over_mean(name: str) -> Callable[[Result], float | None]:
    def measure(result: Result) -> float | None:
        by_rank = list(_by_rank(name)(result).values())
        return max(by_rank) / statistics.fmean(by_rank) if any(by_rank) else None

    return measure


COLUMNS: dict[str, tuple[str, Callable[[Result], Any]]] = {
    "expert_entropy": ("load entropy (1 is even)", _mean_over_layers("/entropy")),
    "max_violation": ("MaxVio", _mean_over_layers("/max_violation")),
    "dead_experts": ("dead experts a layer", _mean_over_layers("/dead")),
    "grad_norm_variance": ("variance of the gradient norm", _summary("grad_norm", "variance")),
    "grad_norm_max": ("largest gradient norm", _summary("grad_norm", "max")),
    "loss_spikes": ("loss spikes", lambda result: result["summary"]["loss_spikes"]),
    "skipped_steps": ("skipped steps", lambda result: result["skipped_steps"]),
    "mtp_gradient_ratio": ("MTP / main gradient norm, depth", _by_depth("validation/gradient_ratio_mtp/")),
    "mtp_acceptance": ("MTP acceptance, depth", _by_depth("validation/acceptance_mtp/")),
    "loss_at": ("held-out loss at length", _by_length("loss")),
    "bpb_at": ("bits per byte at length", _by_length("bpb")),
    "cache_numbers": ("cache, numbers a token", lambda result: result["cache_numbers"]),
    "cache_numbers_expanded": ("expanded cache, numbers a token", lambda result: result["cache_numbers_expanded"]),
    "optimizer_load": ("busiest rank / mean, role", lambda result: result["optimizer_load"]),
    "optimizer_time": ("optimizer step, ms, rank", _by_rank("optimizer")),
    "orthogonalising_time": ("orthogonalising, ms, rank", _by_rank("orthogonalising")),
    "orthogonalising_balance": ("orthogonalising, slowest rank / mean", _slowest_over_mean("orthogonalising")),
    "tps": ("tok/s a device", _summary("tps", "median")),
    "memory": ("memory, GiB a device", _summary("memory/reserved", "max")),
}
"""Heading and value of every column that a family may ask for; a dictionary becomes a column an entry."""


def columns(result: Result, names: Sequence[str]) -> dict[str, float]:
    """Values by heading; without those that this run cannot have."""
    found: dict[str, float] = {}
    for name in names:
        heading, measure = COLUMNS[name]
        value = measure(result)
        entries = {f"{heading} {k}": v for k, v in value.items()} if isinstance(value, dict) else {heading: value}
        found |= {key: float(v) for key, v in entries.items() if v is not None and math.isfinite(v)}
    return found
