"""A plan as tables for a person: one recipe in full, or several side by side."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.plan.estimate import FORMULAS

Plan = dict[str, Any]


def show(plan: Plan, console: Console) -> None:
    """Everything of one plan."""
    tables = {
        "stack": _stack(plan),
        "parameters by part": _parts(plan),
        "parameters by role": _roles(plan),
        "training FLOPs a token": _flops(plan),
        "training FLOPs a token by loop": _loops(plan),
        f"memory of one of {plan['ranks']} ranks (tensors)": _memory(plan),
        "the run": _run([plan]),
    }
    if plan["cache_residency"]:
        tables["weights of a looped zone, and the part of them that an L2 cache holds"] = _caches(plan)
    console.print(_title(plan), style="bold")
    for heading, table in tables.items():
        console.print(f"\n{heading}", style="bold")
        console.print(table)


def compare(plans: Sequence[Plan], console: Console) -> None:
    """The numbers that recipes are chosen by, a column a recipe."""
    console.print(_run(plans))


def _title(plan: Plan) -> str:
    return " + ".join([plan["recipe"], *plan["overlay"]])


def _table(*columns: str) -> Table:
    """A plain table: names on the left, numbers on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        text = i == 0 or name in ("zone", "mixer", "ffn", "formula")
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    return table


def _stack(plan: Plan) -> Table:
    table = _table("step", "layer", "zone", "loop", "mixer", "ffn", "stored", "active", "FLOPs")
    for row in plan["stack"]:
        numbers = (_count(row[key]) for key in ("stored", "active"))
        table.add_row(
            str(row["step"]),
            str(row["layer"]),
            row["zone"],
            str(row["loop"]),
            row["mixer"],
            row["ffn"],
            *numbers,
            _giga(row["flops"]),
        )
    return table


def _parts(plan: Plan) -> Table:
    table = _table("part", "stored", "active")
    for part, n in plan["parameters"]["by_part"].items():
        table.add_row(part, f"{n['stored']:,}", f"{n['active']:,}")
    table.add_row("all", f"{plan['parameters']['total']:,}", f"{plan['parameters']['active']:,}", style="bold")
    return table


def _roles(plan: Plan) -> Table:
    table = _table("role", "stored")
    for role, n in plan["parameters"]["by_role"].items():
        table.add_row(role, f"{n:,}")
    return table


def _flops(plan: Plan) -> Table:
    table = _table("term", "FLOPs", "formula")
    for term, value in plan["flops_per_token"].items():
        if term != "total":
            table.add_row(term, _giga(value), FORMULAS.get(term, ""))
    table.add_row("total", _giga(plan["flops_per_token"]["total"]), style="bold")
    return table


def _loops(plan: Plan) -> Table:
    table = _table("zone", "loop", "steps", "FLOPs")
    for row in plan["flops_by_loop"]:
        table.add_row(row["zone"], str(row["loop"]), str(row["steps"]), _giga(row["flops"]))
    return table


def _caches(plan: Plan) -> Table:
    """A row a zone: its size in compute dtype, then what each GPU's cache holds of it."""
    gpus = plan["cache_residency"][0]["gpus"]
    table = _table("zone", "weights", *(f"{gpu} {held['l2_bytes'] / 2**20:.0f} MiB" for gpu, held in gpus.items()))
    for row in plan["cache_residency"]:
        shares = (f"{100 * held['share']:.0f}%" for held in row["gpus"].values())
        table.add_row(row["zone"], f"{row['bytes'] / 2**20:,.0f} MiB", *shares)
    return table


def _memory(plan: Plan) -> Table:
    table = _table("kind", "size")
    for kind, size in plan["memory_per_rank"].items():
        label = "of it allocated at once, at most" if kind == "allocated" else kind
        table.add_row(label, _size(size), style="bold" if kind == "total" else None)
    return table


def _run(plans: Sequence[Plan]) -> Table:
    """Headline numbers, a column a plan."""
    table = _table("", *(" + ".join(Path(f).stem for f in (p["recipe"], *p["overlay"])) for p in plans))
    for name, values in zip(_HEADLINES, zip(*(_headlines(p) for p in plans), strict=True), strict=True):
        table.add_row(name, *values)
    return table


_LETTERS = ("", " K", " M", " B", " T")
_HEADLINES = (
    "parameters",
    "without the embedding",
    "with nothing looped or shared",
    "active",
    "FLOPs a token",
    "steps",
    "tokens a step",
    "tokens",
    "tokens / active parameter",
    "FLOPs",
    "micro-batches a rank",
    "memory a rank",
    "checkpoint",
    "checkpoints kept",
    "tokens/s a GPU",
    "MFU",
    "time",
    "GPU hours",
    "cost",
)


def _headlines(plan: Plan) -> Iterable[str]:
    parameters, checkpoint, time = plan["parameters"], plan["checkpoint"], plan["time"]
    return (
        *(_count(parameters[key]) for key in ("total", "unique", "virtual", "active")),
        _giga(plan["flops_per_token"]["total"]),
        f"{plan['steps']:,}",
        f"{plan['tokens_per_step']:,}",
        _count(plan["tokens"]),
        f"{plan['tokens'] / parameters['active']:.1f}",
        f"{plan['flops']:.3g}",
        f"{plan['micro_batches']:,}",
        _size(plan["memory_per_rank"]["total"]),
        _size(checkpoint["bytes"]),
        f"{checkpoint['kept']}, {_size(checkpoint['bytes_kept'])}",
        _known(time["tps"], "{:,.0f}"),
        _known(time["mfu"], "{:.1f}%"),
        _known(time["seconds"] and time["seconds"] / 3600, "{:,.2f} h"),
        _known(time["gpu_hours"], "{:,.1f}"),
        _known(time["cost"], "{:,.2f}"),
    )


def _known(value: float | None, form: str) -> str:
    return "N/A" if value is None else form.format(value)


def _count(n: float) -> str:
    """Four digits and a thousand's letter: 1.129 B."""
    power = min(len(_LETTERS) - 1, max(0, (len(str(int(n))) - 1) // 3))
    return f"{n / 1000**power:.4g}{_LETTERS[power]}"


def _giga(n: float) -> str:
    return f"{n / 1e9:.4g} G"


def _size(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.1f} MiB"
