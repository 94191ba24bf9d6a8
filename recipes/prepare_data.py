"""Turn corpora into shards: `python -m recipes.prepare_data train_configs/data/hymo.toml`.

    --dry_run        print what would be taken, from where, how large, and stop
    --only NAME …    these sources of the table and no others
    --workers N      tokenizing processes (default: the machine's cores less one); 0 works in this process
    --verify         read every shard that is there and compare it with its manifest
    --output FOLDER  instead of the table's

Killed at any moment, the same command goes on where it was. Sources that are finished are left alone.
Exit status: 0 done, 1 stopped half-way (disk full, a source that cannot be read; run again), 2 a wrong table.
"""

import errno
import importlib
import os
import shutil
import sqlite3
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import registry
from components.data.journal import Journal
from components.data.preparation import CHUNKS_AHEAD, Preparation, SourceRun, SourceTable, is_prepared, summary, workers
from components.data.shards import Manifest, ShardError, ShardSet, token_dtype
from components.data.sources import SourceError

BYTES_PER_TOKEN = 4.0  # of English text, roughly: only for the estimate of a dry run

console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Arguments:
    """Turn corpora into shards."""

    table: tyro.conf.Positional[str]  # file with [output], [tokenizer] and [sources.NAME]; see train_configs/data/
    only: tuple[str, ...] = ()  # sources to prepare; all of the table if none is named
    workers: int = max(1, (os.cpu_count() or 1) - 1)  # tokenizing processes; 0 works in this process
    output: str | None = None  # folder, instead of the table's
    dry_run: bool = False  # say what would be done, and stop
    verify: bool = False  # read prepared shards and compare them with their manifests, and stop


def main(arguments: Arguments) -> int:
    plan = read_plan(arguments.table, arguments.only)
    plan = replace(plan, output=replace(plan.output, folder=arguments.output or plan.output.folder))
    chosen = arguments.only or tuple(plan.sources)
    if arguments.dry_run:
        return dry_run(plan, chosen)
    if arguments.verify:
        return verify(plan, chosen)
    tokenizer = plan.tokenizer.build()
    with workers(arguments.workers, plan.tokenizer) as pool, Journal(Path(plan.output.folder)) as journal:
        for name in chosen:
            if is_prepared(plan, name, tokenizer):
                console.print(f"{name}: already prepared in {plan.folder(name)}")
                continue
            prepare(SourceRun(plan, name, tokenizer, journal), pool, CHUNKS_AHEAD * max(1, arguments.workers))
    console.print(f"Use each folder in {plan.output.folder}/ as the path of a source in a recipe's [data.sources].")
    return 0


def read_plan(file: str, only: Sequence[str] = ()) -> Preparation:
    """A table as typed values. Raises RecipeError with every problem, a name in `only` that it lacks among them."""
    path = Path(file)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise registry.RecipeError([registry.Problem((), f"cannot be read ({error.strerror})", file)]) from None
    except ValueError as error:
        raise registry.RecipeError([registry.Problem((), f"not valid TOML: {error}", file)]) from None
    for module in table.get("imports", ()):
        importlib.import_module(module)
    problems: list[registry.Problem] = []
    plan = registry.parse_fields(Preparation, table, (), problems)
    for name in only:
        if plan and name not in plan.sources:
            problems.append(registry.Problem(("--only",), registry.unknown("source", name, plan.sources)))
    if problems:
        raise registry.RecipeError(replace(problem, origin=file) for problem in problems)
    return plan


# Preparing ------------------------------------------------------------------------------------------------------------


def prepare(run: SourceRun, pool, ahead: int) -> None:
    """One source, with a progress bar; then what became of its documents."""
    if run.tokens:
        console.print(f"{run.name}: going on after {run.tokens:,} training tokens")
    with progress_bar(run.name, run.target, run.tokens) as report:
        manifest = run.run(pool, ahead, report)
    console.print(f"{run.name}: {split_tokens(manifest)}; {summary(run.tally)}")
    for reason, place in run.tally.places.items():
        if reason.startswith("broken"):
            console.print(f"  {reason}: {run.tally.refused[reason]:,} rows, the first at {place}")
    if run.target and manifest.tokens("train") < run.target:
        console.print(f"  the source ended before its target of {run.target:,} training tokens")


class Rate(ProgressColumn):
    """Tokens a second of the last half-minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{(task.speed or 0) / 1e6:.2f} M tokens/s")


@contextmanager
def progress_bar(name: str, target: int | None, done: int) -> Iterator[Callable[[int], None]]:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=target, completed=done)
        yield lambda tokens: progress.update(task, completed=tokens)


def split_tokens(manifest: Manifest) -> str:
    return ", ".join(f"{manifest.tokens(split):,} {split}" for split in manifest.splits) + " tokens"


# Looking, before and after --------------------------------------------------------------------------------------------


def dry_run(plan: Preparation, chosen: Sequence[str]) -> int:
    """What would be taken, from where, how large. Returns 1 if a source or the tokenizer cannot be found."""
    table = Table(title=f"{plan.output.folder}/")
    for column in ("source", "share", "training tokens", "text", "shards"):
        table.add_column(column, no_wrap=True)
    table.add_column("read from", overflow="fold")
    vocab_size = plan.tokenizer.config.vocab_size
    itemsize, disk, problems = token_dtype(vocab_size).itemsize, 0.0, []
    for name in chosen:
        tokens, where = plan.target(name), _described(plan.sources[name], problems)
        size = (tokens or 0) / plan.output.splits["train"]
        disk += size * itemsize
        sizes = (f"{tokens or 0:,}", f"~{_bytes(size * BYTES_PER_TOKEN)}", _bytes(size * itemsize))
        table.add_row(name, f"{plan.share(name):.1%}", *(sizes if tokens else ("all",) * 3), where)
    console.print(table)
    console.print(f"Tokenizer {plan.tokenizer.name}: {vocab_size:,} ids, {itemsize} bytes a token on disk.")
    if plan.output.target_tokens:
        free = shutil.disk_usage(_existing(Path(plan.output.folder))).free
        console.print(f"Needs {_bytes(disk)} of disk and about 20 bytes a document; {_bytes(free)} are free.")
    try:
        plan.tokenizer.build()
    except ValueError as error:
        problems.append(str(error))
    for problem in problems:
        console.print(f"Not yet: {problem}")
    return min(len(problems), 1)


def _described(source: SourceTable, problems: list[str]) -> str:
    try:
        return source.read.build().describe()
    except SourceError as error:
        problems.append(str(error))
        return "not there"


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return folder if folder.exists() else _existing(folder.parent)


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def verify(plan: Preparation, chosen: Sequence[str]) -> int:
    """Reads every shard; prints each problem. Returns 1 if there is one."""
    wrong = 0
    for name in chosen:
        try:
            manifest = Manifest.read(plan.folder(name))
            found = [p for split in manifest.splits for p in ShardSet.open(plan.folder(name), split).verify()]
        except ShardError as error:
            found = [str(error)]
        wrong += len(found)
        for problem in found or [f"{name}: {len(manifest.shards)} shards are whole, {split_tokens(manifest)}"]:
            console.print(problem)
    return min(wrong, 1)


def command(arguments: list[str] | None = None) -> int:
    try:
        return main(tyro.cli(Arguments, prog="python -m recipes.prepare_data", args=arguments))
    except SourceError as error:
        console.print(f"Stopped: {error}")
        return 1
    except (KeyboardInterrupt, BrokenProcessPool) as error:
        console.print(f"Stopped: {str(error) or 'interrupted.'} Nothing is lost: run the same command to go on.")
        return 1
    except (OSError, sqlite3.OperationalError) as error:
        if isinstance(error, NotADirectoryError | FileExistsError | PermissionError):
            console.print(
                f"Stopped: {error.filename}: {error.strerror}. Shards go to the table's folder, or to --output."
            )
            return 1
        if getattr(error, "errno", None) != errno.ENOSPC and "full" not in str(error):
            raise
        console.print(
            f"Stopped: the disk is full ({error}). Nothing is lost: free some space and run the same command."
        )
        return 1
    except ValueError as error:  # a wrong table or tokenizer; RecipeError holds every problem
        console.print(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(command())
