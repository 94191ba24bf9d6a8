"""report.md and report.csv: what every change did, with its interval, and a warning where more than the idea differs.

Losses are nats per token on held-out text. The reference comes first; differences are variant - reference.
"""

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.ablate.measure import AXES, ROUNDING, columns, common_end, position, reading
from recipes.ablate.statistics import Interval, interval, judgement, paired, verdict
from recipes.result import Result

TOLERANCE = 0.005  # relative difference in size, FLOPs or tokens that is worth a warning
NONE = "–"
ALWAYS = ("tps", "memory")  # columns of every report
HEADS = {"tokens": "at equal tokens", "FLOPs": "at equal FLOPs", "seconds": "at equal time"}
ENDS = {"tokens": ",.0f", "FLOPs": ".4g", "seconds": ",.1f"}  # how a place on an axis is written
READINGS = {"loss": ("loss", None), "perplexity": ("loss", math.exp), "bits per byte": ("bpb", None)}


@dataclass(frozen=True)
class Group:
    """The finished runs of one variant, by seed."""

    name: str
    runs: Mapping[int, Result]
    about: str = ""
    at_least: float | None = None  # bounds that the claim puts on its difference
    at_most: float | None = None
    notes: Sequence[str] = ()  # how it was matched, what failed

    def first(self) -> Result:
        return next(iter(self.runs.values()))

    def measured(self, measure: Callable[[Result], float | None]) -> dict[int, float]:
        """A value by seed, of the runs that have it."""
        found = {seed: measure(result) for seed, result in self.runs.items()}
        return {seed: value for seed, value in found.items() if value is not None}


@dataclass(frozen=True)
class Report:
    """All that is reported: the first group is the reference."""

    title: str
    groups: Sequence[Group]
    claim: str = ""
    refuted_by: str = ""
    columns: Sequence[str] = ()
    missing: Sequence[str] = field(default=())  # sentences on variants of which no run finished

    @property
    def reference(self) -> Group:
        return self.groups[0]

    def results(self) -> list[Result]:
        return [result for group in self.groups for result in group.runs.values()]

    @property
    def shared(self) -> bool:
        """Whether some run had its device not to itself, so that times say nothing."""
        return any(result.get("runs_a_device", 1) > 1 for result in self.results())

    @property
    def axes(self) -> tuple[str, ...]:
        """What losses are compared along."""
        return tuple(axis for axis in AXES if not (self.shared and axis == "seconds"))

    @property
    def always(self) -> tuple[str, ...]:
        """Columns that are reported whatever was asked for."""
        return tuple(name for name in ALWAYS if not (self.shared and name == "tps"))

    def readings(self, group: Group, axis: str, name: str) -> dict[int, float]:
        """Loss, perplexity or bits per byte by seed, where the shortest run of the report ended on this axis."""
        key, turn = READINGS[name]
        end = common_end(self.results(), axis)
        found = group.measured(lambda result: reading(result, axis, end, f"validation/{key}"))
        return {seed: turn(value) for seed, value in found.items()} if turn else found


def write_report(report: Report, folder: Path) -> None:
    """report.md and report.csv into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    with (folder / "report.csv").open("w", newline="", encoding="utf-8") as file:
        rows = [row for group in report.groups for row in csv_rows(report, group)]
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


# Markdown -------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """The whole report."""
    parts = [f"# {report.title}"]
    if report.claim:
        parts.append(f"**Claim.** {report.claim}.\n\n**Refuted if** {report.refuted_by}.")
    parts += [
        _section("Held-out loss", _losses(report)),
        _section(f"Difference to {report.reference.name}", _differences(report)),
        _section("Perplexity and bits per byte, at equal tokens", _other_readings(report)),
        _section("Size and speed", _sizes(report)),
    ]
    if any(columns(result, report.columns) for result in report.results()):
        parts.append(_section("What else was asked", _own(report)))
    parts.append(_section("Remarks", _remarks(report)))
    parts.append("![loss](loss.png)\n\n![differences](differences.png)\n\n![training](training.png)")
    if any(result["expert_load"] for result in report.results()):
        parts.append("![load by expert](expert_load.png)")
    return "\n\n".join(parts) + "\n"


def _section(heading: str, body: str) -> str:
    return f"## {heading}\n\n{body}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _losses(report: Report) -> str:
    ends = ", ".join(f"{common_end(report.results(), axis):{ENDS[axis]}} {axis}" for axis in report.axes)
    rows = [
        [_label(report, g), str(len(g.runs)), *(shown(report.readings(g, axis, "loss")) for axis in report.axes)]
        for g in report.groups
    ]
    head = ["variant", "seeds", *(HEADS[axis] for axis in report.axes)]
    text = f"Nats per token, mean ± 95% interval over seeds, read where the shortest run ended: {ends}."
    return f"{text}\n\n{_table(head, rows)}"


def _differences(report: Report) -> str:
    """A row a variant: paired differences with verdicts, then the claim's bound."""
    rows = []
    for group in report.groups[1:]:
        found = [
            paired(report.readings(group, a, "loss"), report.readings(report.reference, a, "loss")) for a in report.axes
        ]
        cells = [NONE if d is None else f"{signed(d)}, {verdict(d)}" for d in found]
        rows.append([_label(report, group), *cells, _judged(found[0], group)])
    head = ["variant", *(HEADS[axis] for axis in report.axes), "the claim's bound"]
    text = (
        "Paired over seeds that saw the same batches, mean and 95% interval (Student t). A lower loss is better; a "
        "difference whose interval holds 0 is not separated. Intervals are not corrected for the number of variants."
    )
    return f"{text}\n\n{_table(head, rows)}" if rows else "There is nothing to compare with."


def _judged(difference: Interval | None, group: Group) -> str:
    """The bound on the difference at equal tokens, and whether it is kept."""
    if difference is None or (judged := judgement(difference, group.at_least, group.at_most)) is None:
        return NONE
    bound = f"≥ {group.at_least:g}" if group.at_least is not None else f"≤ {group.at_most:g}"
    return f"{bound}: {judged}"


def _other_readings(report: Report) -> str:
    forms = {"perplexity": ".2f", "bits per byte": ".4f"}
    rows = [[g.name, *(shown(report.readings(g, "tokens", n), f) for n, f in forms.items())] for g in report.groups]
    return _table(["variant", *forms], rows)


def _sizes(report: Report) -> str:
    rows = []
    for group in report.groups:
        first, n = group.first(), group.first()["parameters"]
        flops = f"{first['flops_per_token']['total'] / 1e9:.4g}"
        tokens = f"{first['tokens']:,}"
        speed = [_own_value(group, report.always, heading) for heading in _headings(report, report.always)]
        row = [_label(report, group), _millions(n["total"]), _millions(n["active"]), flops, tokens, *speed]
        rows.append(row)
    head = ["variant", "stored", "active", "GFLOP a token", "tokens", *_headings(report, report.always)]
    return _table(head, rows)


def _own(report: Report) -> str:
    headings = _headings(report, report.columns)
    rows = [[g.name, *(_own_value(g, report.columns, heading) for heading in headings)] for g in report.groups]
    return _table(["variant", *headings], rows)


def _headings(report: Report, names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(h for result in report.results() for h in columns(result, names)))


def _own_value(group: Group, names: Sequence[str], heading: str) -> str:
    found = group.measured(lambda result: columns(result, names).get(heading))
    return _spread(found, lambda n: rounded(n, 4), lambda n: rounded(n, 2))


def _label(report: Report, group: Group) -> str:
    return f"{group.name} ⚠" if unequal(group, report.reference) else group.name


def _remarks(report: Report) -> str:
    lines = [f"{group.name}: {group.about}." for group in report.groups if group.about]
    for group in report.groups:
        unlike = unequal(group, report.reference)
        if unlike:
            lines.append(f"⚠ {group.name} differs in {', '.join(unlike)}: the comparison is not of the idea alone.")
        lines += [f"{group.name}: {note}." for note in group.notes]
    if report.shared:
        lines.append(
            "⚠ Runs shared devices: times and speeds measure the others too, so tok/s and readings at equal time are "
            "left out."
        )
    devices = {(result["device"], result["ranks"]) for result in report.results()}
    if len(devices) > 1:
        places = ", ".join(f"{ranks} × {device}" for device, ranks in sorted(devices))
        lines.append(f"⚠ The runs were made on different machines ({places}): times and speeds do not compare.")
    if early := [HEADS[axis] for axis in report.axes if _beyond_common_end(report, axis)]:
        lines.append(
            f"Some runs are read before their end ({', '.join(early)}), by linear interpolation between validations, "
            "where a schedule that decays has not come down yet."
        )
    return "\n".join(f"* {line}" for line in [*lines, *report.missing])


def _beyond_common_end(report: Report, axis: str) -> bool:
    """Whether some run went on after the place where all are read."""
    ends = [position(result, axis, result["tokens"]) for result in report.results()]
    return max(ends) > common_end(report.results(), axis) * (1 + ROUNDING)


def unequal(group: Group, reference: Group) -> list[str]:
    """In what a variant's size, cost or length differs from the reference's, with both numbers."""
    one, other = group.first(), reference.first()
    pairs = {
        "active parameters": (one["parameters"]["active"], other["parameters"]["active"]),
        "FLOPs a token": (one["flops_per_token"]["total"], other["flops_per_token"]["total"]),
        "tokens": (one["tokens"], other["tokens"]),
    }
    return [
        f"{k} ({rounded(a, 4)} against {rounded(b, 4)})" for k, (a, b) in pairs.items() if abs(a - b) > TOLERANCE * b
    ]


def shown(values: Mapping[int, float], form: str = ".4f") -> str:
    """Mean ± half the interval, where there is one."""
    return _spread(values, lambda n: f"{n:{form}}", lambda n: f"{n:{form}}")


def _spread(values: Mapping[int, float], mean: Callable[[float], str], half: Callable[[float], str]) -> str:
    if not values:
        return NONE
    found = interval(list(values.values()))
    return f"{mean(found.mean)} ± {half(found.half)}" if found.half else mean(found.mean)


def rounded(n: float, digits: int) -> str:
    """A number to so many digits, without an exponent where it is large: 108,900 and not 1.089e+05."""
    n = float(f"{n:.{digits}g}")
    return f"{n:,.0f}" if abs(n) >= 10 ** (digits - 1) else f"{n:.{digits}g}"


def signed(difference: Interval) -> str:
    """A difference with its interval."""
    if difference.half is None:
        return f"{difference.mean:+.4f}"
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def _millions(n: float) -> str:
    return f"{n / 1e6:,.4g} M" if n < 1e9 else f"{n / 1e6:,.1f} M"


# CSV ------------------------------------------------------------------------------------------------


def csv_rows(report: Report, group: Group) -> list[dict[str, object]]:
    """A row a run, then the variant's means and differences to the reference."""
    by_reading = {f"{name} at equal {axis}": (axis, name) for axis in report.axes for name in READINGS}
    values = {label: report.readings(group, *which) for label, which in by_reading.items()}
    names = (*report.always, *report.columns)
    rows = [
        {
            "variant": group.name,
            "seed": seed,
            "stored": result["parameters"]["total"],
            "active": result["parameters"]["active"],
            "FLOPs a token": result["flops_per_token"]["total"],
            "tokens": result["tokens"],
            **{label: found[seed] for label, found in values.items() if seed in found},
            **columns(result, names),
        }
        for seed, result in group.runs.items()
    ]
    means = {label: statistics.fmean(found.values()) for label, found in values.items() if found}
    return [*rows, {"variant": group.name, "seed": "mean", **means}, *_csv_differences(report, group)]


def _csv_differences(report: Report, group: Group) -> list[dict[str, object]]:
    """Mean, ends of the interval and verdict of the difference in loss, a row each."""
    rows = {kind: {"variant": group.name, "seed": kind} for kind in ("difference", "low", "high", "verdict")}
    for axis in report.axes:
        found = paired(report.readings(group, axis, "loss"), report.readings(report.reference, axis, "loss"))
        if found is not None:
            values = (found.mean, found.low, found.high, verdict(found))
            for kind, value in zip(rows, values, strict=True):
                rows[kind][f"loss at equal {axis}"] = value
    return list(rows.values()) if group is not report.reference else []
