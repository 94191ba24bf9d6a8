"""A family's runs: what each is, which are finished, and making the others through the real entrypoint.

Every run is a process of its own (torchrun where it has several ranks) in its own folder, so that one that fails stops
no other, and one that was stopped goes on from its checkpoint. Where a result file of the same resolved recipe lies in
the folder, the run is finished, wherever it was made.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recipes.ablate.family import REFERENCE, Family
from recipes.ablate.match import matched
from recipes.ablate.progress import Display
from recipes.job import Job, load, to_table
from recipes.result import SHARING, other_recipe, read_result

DEVICES = "CUDA_VISIBLE_DEVICES"
PAUSE = 0.2  # seconds between looks at the runs
LAST_WORDS = 300  # characters of a failed run's last line
LAST_LINE = 4096  # bytes from the end of metrics.jsonl that hold its last line


@dataclass(frozen=True)
class Planned:
    """One run of one variant."""

    variant: str
    seed: int
    folder: Path
    flags: tuple[str, ...]  # of recipes.pretrain
    recipe: dict[str, Any]  # resolved
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def steps(self) -> int:
        return self.recipe["training"]["steps"]

    def finished(self) -> bool:
        """Whether its result is there. ValueError where the folder holds another recipe's run."""
        result = read_result(self.folder)
        for table in (result["recipe"] if result else self._begun(),):
            changed = other_recipe(table, self.recipe) if table else []
            if changed:
                raise ValueError(
                    f"{self.folder} holds a run of another recipe ({', '.join(changed[:4])}"
                    f"{' …' if len(changed) > 4 else ''}); remove it, or choose another --folder"
                )
        return result is not None

    def _begun(self) -> dict[str, Any] | None:
        """The recipe that a started run wrote down."""
        path = self.folder / "recipe.toml"
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def step(self) -> int:
        """The step it last logged."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_LINE))
                return json.loads(file.read().splitlines()[-1])["step"]
        except (OSError, ValueError, KeyError, IndexError):
            return 0  # no line yet, or one that is being written

    def last_words(self) -> str:
        """Where its console is, and the end of what it said there, which is why it failed; not of torchrun, whose own
        account comes last."""
        log = self.folder / "console.log"
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if self.ranks == 1 else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" (see {log})" + (f": {last[:LAST_WORDS]}" if last else "")

    def start(self, slot: "Slot") -> subprocess.Popen:
        """Its process, on the slot's devices; what it prints goes to console.log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}", "-m")
        launcher = torchrun if self.ranks > 1 else ()
        devices = {DEVICES: slot.devices} if slot.devices else {}
        environment = os.environ | devices | {SHARING: str(slot.runs)}
        with (self.folder / "console.log").open("ab") as log:
            command = [sys.executable, "-m", *launcher, "recipes.pretrain", *self.flags]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def plan(
    family: Family, flags: Sequence[str], seeds: int, ranks: int, folder: Path
) -> tuple[list[Planned], dict[str, list[str]]]:
    """Every run, seed by seed, so that what was made first compares; and what is to say of each variant: how it was
    matched, or why its recipe is refused. ValueError if the reference's is."""
    reference = load(_flags(family, REFERENCE, flags), needs_data=False, ranks=ranks)
    runs: list[Planned] = []
    notes: dict[str, list[str]] = {}
    for variant in family.names():
        try:
            mine, notes[variant] = _matched(family, variant, _flags(family, variant, flags), reference, ranks)
            job = load(mine, needs_data=False, ranks=ranks)
        except ValueError as error:
            if variant == REFERENCE:
                raise
            notes[variant] = [f"refused: {error}"]
            continue
        runs += [_planned(variant, seed, job, mine, ranks, folder) for seed in range(seeds)]
    return sorted(runs, key=lambda run: run.seed), notes


def _flags(family: Family, variant: str, flags: Sequence[str]) -> list[str]:
    overlays = [word for overlay in family.overlays for word in ("--job.overlay", family.path(overlay))]
    return ["--job.config_file", family.recipe(variant), *overlays, *flags]


def _matched(family: Family, variant: str, flags: list[str], reference: Job, ranks: int) -> tuple[list[str], list[str]]:
    """The flags with those that the variant's matches add, and what they did."""
    notes = []
    for match in family.variants[variant].match if variant != REFERENCE else ():
        value, note = matched(load(flags, needs_data=False, ranks=ranks), match, reference)
        flags, notes = [*flags, f"--{match.key}", str(value)], [*notes, note]
    return flags, notes


def _planned(variant: str, seed: int, job: Job, flags: list[str], ranks: int, folder: Path) -> Planned:
    place = folder / variant / f"seed-{seed}"
    own = ("--job.dump_folder", str(place), "--data.seed", str(seed), "--debug.seed", str(seed))
    table = to_table(replace(job, data=replace(job.data, seed=seed), debug=replace(job.debug, seed=seed)))
    return Planned(variant, seed, place, (*flags, *own), table, ranks)


# Running --------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Somebody asked the command to stop; its runs have saved and ended."""


def run_all(runs: Sequence[Planned], side_by_side: int, display: Display) -> dict[str, str]:
    """Make the runs that are not finished, so many at once; why each one that failed did, by its name.

    Raises Stopped after SIGTERM or SIGINT, which the running ones are told too.
    """
    failures: dict[str, str] = {}
    waiting = list(_unfinished(runs, failures))
    display.begin(waiting, len(runs) - len(waiting) - len(failures))
    slots = make_slots(side_by_side, runs[0].ranks) if runs else []
    running: dict[int, tuple[Planned, subprocess.Popen]] = {}
    with _stoppable() as asked:
        while (waiting or running) and not asked:
            for slot in range(len(slots)):
                if slot not in running and waiting:
                    running[slot] = (waiting[0], waiting.pop(0).start(slots[slot]))
            time.sleep(PAUSE)
            for slot, (run, process) in list(running.items()):
                display.update(run)
                if process.poll() is not None:
                    del running[slot]
                    _ended(run, process.returncode, failures, display)
        _stop([process for _, process in running.values()])
    if asked:
        raise Stopped
    return failures


def _unfinished(runs: Sequence[Planned], failures: dict[str, str]) -> Iterator[Planned]:
    for run in runs:
        try:
            if not run.finished():
                yield run
        except ValueError as error:
            failures[run.name] = str(error)


def _ended(run: Planned, status: int, failures: dict[str, str], display: Display) -> None:
    try:
        reason = None if run.finished() else f"ended with status {status} and no result{run.last_words()}"
    except ValueError as error:
        reason = str(error)
    if reason:
        failures[run.name] = reason
    display.end(run, reason)


@contextlib.contextmanager
def _stoppable() -> Iterator[list[int]]:
    """A list that is empty until somebody asks to stop."""
    asked: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _stop(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


@dataclass(frozen=True)
class Slot:
    """Where a run goes on beside others."""

    devices: str | None  # CUDA devices; None leaves them as they are
    runs: int  # at once on each of them (on this host where there are none)


def make_slots(side_by_side: int, ranks: int) -> list[Slot]:
    """One for each run that goes on at the same time. Runs of one rank share devices where there are fewer; ValueError
    for larger ones, whose collectives would wait for each other's kernels."""
    stated = os.environ.get(DEVICES)
    devices = stated.split(",") if stated else [str(i) for i in range(torch.cuda.device_count())]
    if not devices or side_by_side == 1:
        return [Slot(None, side_by_side)] * side_by_side
    if side_by_side * ranks <= len(devices):
        return [Slot(",".join(devices[i * ranks : (i + 1) * ranks]), 1) for i in range(side_by_side)]
    if ranks == 1:
        return [Slot(devices[i % len(devices)], -(-side_by_side // len(devices))) for i in range(side_by_side)]
    raise ValueError(
        f"{side_by_side} runs of {ranks} ranks need {side_by_side * ranks} GPUs; {len(devices)} are there, and only "
        "runs of one rank share them"
    )
