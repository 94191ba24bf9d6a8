"""The report of recipes.ablate over any finished runs.

    python -m recipes.compare outputs/hymo_primary outputs/hymo_small --to outputs/comparison

Runs are dump folders with a result.json. Those whose recipes differ in nothing but [data] seed and [debug] seed are
seeds of one variant; the first run's variant is the reference. Whether two runs saw the same batches is for the reader
to know: equal seeds over equal data did.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import registry
from recipes.ablate.figures import draw
from recipes.ablate.measure import COLUMNS
from recipes.ablate.report import Group, Report, write_report
from recipes.result import Result, other_recipe, read_result

SEEDS = {"data.seed", "debug.seed"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare finished runs."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]  # dump folders
    to: str = "outputs/comparison"  # where the report goes
    figures: bool = True  # needs matplotlib


def main(arguments: list[str]) -> int:
    options = tyro.cli(Options, prog="python -m recipes.compare", args=arguments, use_underscores=True)
    registry.discover()  # recipes written before a key existed are completed by their components
    report = Report("Comparison of runs", grouped([Path(run) for run in options.runs]), columns=tuple(COLUMNS)[:-2])
    folder = Path(options.to)
    write_report(report, folder)
    if options.figures:
        draw(report, folder)
    print(f"report: {folder / 'report.md'}")
    return 0


def grouped(folders: Sequence[Path]) -> list[Group]:
    """Runs of one recipe together, by [debug] seed. ValueError for a folder without a result and for a seed that is
    there twice."""
    found: list[tuple[str, dict[int, Result]]] = []
    for folder in folders:
        result = read_result(folder)
        if result is None:
            raise ValueError(f"{folder} has no result.json: its run has not finished, or it is no dump folder")
        seed = result["recipe"]["debug"]["seed"]
        mine = next((runs for _, runs in found if _same_variant(next(iter(runs.values())), result)), None)
        if mine is None:
            mine = {}
            found.append((_name(folder), mine))
        if seed in mine:
            raise ValueError(f"{folder} is the second run of that recipe with seed {seed}; name one of them")
        mine[seed] = result
    if not found:
        raise ValueError("which runs? name their dump folders")
    return [Group(name, runs) for name, runs in found]


def _same_variant(one: Result, other: Result) -> bool:
    return set(other_recipe(one["recipe"], other["recipe"])) <= SEEDS


def _name(folder: Path) -> str:
    """The folder's, or its parent's where it is called after a seed."""
    return folder.resolve().parent.name if folder.name.startswith("seed-") else folder.resolve().name


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
