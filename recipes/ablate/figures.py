"""The report's pictures: held-out loss along tokens, FLOPs and time; differences with intervals; how training went; the
load of every expert. Bands are 95% intervals over seeds; with one seed there is none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.ablate.measure import curve, reading
from recipes.ablate.report import Group, Report
from recipes.ablate.statistics import interval, paired
from recipes.result import Result

DPI = 120
LABELS = {"tokens": "tokens", "FLOPs": "training FLOPs", "seconds": "seconds of steps"}


def draw(report: Report, folder: Path) -> None:
    """loss.png, differences.png, training.png and, where there are experts, expert_load.png. ValueError without
    matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"loss": losses, "differences": differences, "training": training}
    if any(group.first()["expert_load"] for group in report.groups):
        figures["expert_load"] = expert_load
    for name, make in figures.items():
        make(report).savefig(folder / f"{name}.png", dpi=DPI)


def new_figure(width: float, height: float) -> Any:
    """An empty one of so many inches. ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figures need matplotlib; `pip install -e .[data]`, or leave them out") from None
    return Figure(figsize=(width, height), layout="constrained")


def _thousands() -> Any:
    """Numbers as 20 k, 1.5 G."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter()


def _colour(number: int) -> str:
    return f"C{number % 10}"


def _style(number: int) -> str:
    """Colours repeat after ten; lines then differ."""
    return ("-", "--", ":", "-.")[number // 10 % 4]


def losses(report: Report) -> Any:
    """Held-out loss along every axis."""
    figure = new_figure(14, 4.5)
    for number, axis in enumerate(report.axes):
        axes = figure.add_subplot(1, len(report.axes), number + 1, xlabel=LABELS[axis])
        for i, group in enumerate(report.groups):
            at, middle, half = _band(group, axis)
            axes.plot(at, middle, _style(i), marker=".", color=_colour(i), label=group.name)
            low, high = ([m + s * h for m, h in zip(middle, half, strict=True)] for s in (-1, 1))
            axes.fill_between(at, low, high, color=_colour(i), alpha=0.15, linewidth=0)
        axes.set_ylim(*_window(report))
        axes.xaxis.set_major_formatter(_thousands())
        axes.locator_params(axis="x", nbins=6)
        axes.grid(alpha=0.3)
        if number == 0:
            axes.set_ylabel("held-out loss, nats per token")
            axes.legend(fontsize="small")
    return figure


def _band(group: Group, axis: str) -> tuple[list[float], list[float], list[float]]:
    """Places of the first seed's validations that every seed reached, the mean loss there, half its interval (0 for one
    seed)."""
    at, means, halves = [], [], []
    for place in curve(group.first(), axis)[0]:
        values = list(group.measured(lambda result, x=place: reading(result, axis, x)).values())
        if len(values) == len(group.runs):
            found = interval(values)
            at.append(place)
            means.append(found.mean)
            halves.append(found.half or 0.0)
    return at, means, halves


def _window(report: Report) -> tuple[float, float]:
    """Losses worth seeing: from the lowest to where every variant's second validation is; bands may be cut."""
    curves = [curve(result, "tokens")[1] for result in report.results()]
    curves = [c for c in curves if c]
    if not curves:
        return 0.0, 1.0
    low, high = min(min(c) for c in curves), max(c[0] if len(c) < 3 else c[1] for c in curves)
    room = 0.08 * max(high - low, 0.02)
    return low - room, high + room


def differences(report: Report) -> Any:
    """Difference in loss to the reference at equal tokens: mean, interval, and every seed as a dot."""
    others = report.groups[1:]
    figure = new_figure(8, 1.6 + 0.45 * max(1, len(others)))
    axes = figure.add_subplot(xlabel=f"loss - loss of {report.reference.name}, nats per token at equal tokens")
    axes.axvline(0, color="black", linewidth=0.8)
    base = report.readings(report.reference, "tokens", "loss")
    for row, group in enumerate(others):
        mine = report.readings(group, "tokens", "loss")
        found = paired(mine, base)
        if found is None:
            continue
        axes.errorbar(found.mean, row, xerr=found.half or 0.0, fmt="o", color=_colour(row + 1), capsize=4)
        seeds = [mine[s] - base[s] for s in mine if s in base]
        axes.plot(seeds, [row + 0.22] * len(seeds), ".", color=_colour(row + 1), alpha=0.5)
        bound = group.at_least if group.at_least is not None else group.at_most
        if bound:
            axes.plot([bound] * 2, [row - 0.4, row + 0.4], ":", color="grey")
    axes.set_yticks(range(len(others)), [group.name for group in others])
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    return figure


def training(report: Report) -> Any:
    """Of each variant's first seed: training loss, gradient norm, learning rates and update RMS by role."""
    figure = new_figure(14, 8)
    panels = {
        "loss": "training loss",
        "grad_norm": "gradient norm",
        "lr/": "learning rate",
        "update_rms/": "update RMS",
    }
    for number, (start, title) in enumerate(panels.items()):
        axes = figure.add_subplot(2, 2, number + 1, title=title, xlabel="step")
        by_role = start.endswith("/")
        if start != "loss":
            axes.set_yscale("log")
        for i, group in enumerate(report.groups):
            for j, (key, steps, values) in enumerate(_curves(group.first(), start)):
                style = ("-", "--", ":", "-.", (0, (1, 5)))[j % 5] if by_role else _style(i)
                label = key.removeprefix(start) if by_role and i == 0 else group.name if not by_role else None
                axes.plot(steps, values, linestyle=style, color=_colour(i), label=label, linewidth=1)
        axes.grid(alpha=0.3)
        heading = "line: role; colour: variant, as above" if by_role else None
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", title=heading, title_fontsize="x-small")
    return figure


def _curves(result: Result, start: str) -> Iterator[tuple[str, list[int], list[float]]]:
    """Every curve of this key or group of keys, without what is no number."""
    for key, values in result["curves"].items():
        if key == start or (start.endswith("/") and key.startswith(start)):
            known = [(s, v) for s, v in zip(result["curves"]["step"], values, strict=True) if v]
            yield key, [s for s, _ in known], [v for _, v in known]


def expert_load(report: Report) -> Any:
    """Share of each layer's tokens by expert, over the mean share: 1 is even. Of each variant's first seed."""
    groups = [group for group in report.groups if group.first()["expert_load"]]
    rows = [max(2, len(group.first()["expert_load"])) for group in groups]
    figure = new_figure(7, 0.8 + sum(0.9 + 0.22 * n for n in rows))
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        load = group.first()["expert_load"]
        even = [[share * len(shares) for share in shares] for shares in load.values()]
        image = axes.imshow(even, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
        axes.set_yticks(range(len(load)), load)
        axes.set(title=group.name, ylabel="layer", xlabel="expert")
    figure.colorbar(image, ax=list(panels), label="load / mean load", extend="max", shrink=0.8)
    return figure
