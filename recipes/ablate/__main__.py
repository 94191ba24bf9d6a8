"""A family of recipes: every variant over seeds on the same batches, then a report of what each change did.

    python -m recipes.ablate debug
    python -m recipes.ablate b_optimizers --overlay train_configs/scales/proxy.toml --seeds 3 --ranks 1
    python -m recipes.ablate h_model --ranks 8 --slurm h_model.sh

FAMILY is a folder of train_configs/ablations, or a path to one. Flags of recipes.pretrain work too, such as
--training.steps 500, and apply to every run. The same command again goes on where it stopped, runs nothing that is
finished, and writes the report anew. Status 1 where a run failed.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from recipes.ablate.family import REFERENCE, Family, Variant, read_family
from recipes.ablate.figures import draw
from recipes.ablate.measure import COLUMNS
from recipes.ablate.progress import Display
from recipes.ablate.report import Group, Report, write_report
from recipes.ablate.runs import Planned, Stopped, plan, run_all
from recipes.ablate.slurm import array_script
from recipes.job import refuse_unwritable
from recipes.job.flags import split_options, without
from recipes.result import read_result
from registry import unknown

STOPPED = 143  # the status of a command that SIGTERM ended


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run a family and report on it: `python -m recipes.ablate FAMILY [options] [flags of recipes.pretrain]`."""

    overlay: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()  # laid after the family's own, repeatable
    only_variants: tuple[str, ...] = ()  # leave the others out; the reference always takes part
    seeds: int | None = None  # runs of each variant; the family says how many if not stated
    ranks: int = 1  # GPUs (or processes) of each run
    side_by_side: int = 1  # runs at the same time; those of one rank share GPUs where there are fewer
    folder: str | None = None  # of runs and report; outputs/ablations/FAMILY, with the names of the overlays
    slurm: str | None = None  # write an array script to this file instead of running
    only: int | None = None  # make the run of this number alone and write no report (a task of the array)
    report_only: bool = False  # of the runs that are there
    figures: bool = True  # needs matplotlib

    def __post_init__(self) -> None:
        for name in ("seeds", "ranks", "side_by_side"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"--{name} must be at least 1, not {number}")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        arguments = ["", *arguments]
    name, *rest = arguments
    options, flags = split_options(Options, "python -m recipes.ablate FAMILY", rest)
    family = _chosen(read_family(name), options.only_variants)
    folder = Path(
        options.folder or "-".join([f"outputs/ablations/{family.name}", *(Path(o).stem for o in options.overlay)])
    )
    flags = [word for overlay in options.overlay for word in ("--job.overlay", overlay)] + flags
    runs, notes = plan(family, flags, options.seeds or family.seeds, options.ranks, folder)
    if options.slurm:
        return _write_array(family, options, arguments, len(runs))
    if options.only is not None:
        if options.only not in range(len(runs)):
            raise ValueError(f"--only {options.only}: there is no such run; they are numbered 0 to {len(runs) - 1}")
        runs = [runs[options.only]]
    refuse_unwritable(str(folder), "--folder")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not options.report_only:
        with Display(console) as display:
            for run, reason in run_all(runs, options.side_by_side, display).items():
                notes.setdefault(run.split(" seed ")[0], []).append(f"{run} failed: {reason}")
    if options.only is None:
        _report(family, runs, notes, folder, options.figures, console)
    bad = [note for found in notes.values() for note in found if " failed: " in note or note.startswith("refused: ")]
    for note in bad:
        console.print(note)
    return 1 if bad else 0


def _chosen(family: Family, variants: Sequence[str]) -> Family:
    """The family with these variants only."""
    wrong = [unknown("variant", v, family.variants) for v in variants if v not in family.variants]
    wrong += [f"{family.name}: {unknown('column', c, COLUMNS)}" for c in family.columns if c not in COLUMNS]
    if wrong:
        raise ValueError("\n".join(wrong))
    for left_out in set(family.variants) - set(variants or family.variants):
        del family.variants[left_out]
    return family


def _write_array(family: Family, options: Options, arguments: list[str], runs: int) -> int:
    script = array_script(family.name, without(arguments, "--slurm"), runs, options.ranks, options.slurm)
    Path(options.slurm).write_text(script, encoding="utf-8")
    print(f"written: {options.slurm}, {runs} tasks; sbatch {options.slurm}")
    return 0


def _report(
    family: Family,
    runs: Sequence[Planned],
    notes: Mapping[str, list[str]],
    folder: Path,
    figures: bool,
    console: Console,
) -> None:
    """Of the runs that are finished; without the reference's there is none."""
    variants = {REFERENCE: Variant(about=family.recipe(REFERENCE))} | family.variants
    groups, missing = [], []
    for name, variant in variants.items():
        found = {run.seed: read_result(run.folder) for run in runs if run.variant == name and _is_there(run)}
        said = notes.get(name, [])
        if found:
            groups.append(Group(name, found, variant.about, variant.at_least, variant.at_most, said))
        else:
            missing.append(f"{name} ({variant.about}) has no finished run. {' '.join(said)}".strip())
    if not groups or groups[0].name != REFERENCE:
        console.print(f"no report: the reference has no finished run in {folder}")
        return
    report = Report(family.name, groups, family.claim, family.refuted_by, family.columns, missing)
    write_report(report, folder)
    if figures:
        draw(report, folder)
    console.print(f"report: {folder / 'report.md'}")


def _is_there(run: Planned) -> bool:
    """Finished, and of this recipe; another one's was told already."""
    try:
        return run.finished()
    except ValueError:
        return False


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Stopped:
        print("stopped: what ran has saved; the same command goes on", file=sys.stderr)
        sys.exit(STOPPED)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
