"""Checkpoints of a run: save, prune, find the newest good one, load; a crash at any instant leaves the previous one.

A save ends with a marker that rank 0 writes when every rank's files are on disk and their checksums known
(`folder.py`). Until then the checkpoint does not exist; pruning starts only after it does. Saves may go on in the
background: tensors are copied to host memory first, and the next save, load or `wait()` waits for them.
`torch.distributed.checkpoint.async_save` is not used for that: its future is done before checksums and marker are, and
those need the same thread. Collectives go through a gloo group of their own, so that they never meet the training's.

The manner of folders and names is TorchTitan's: `<dump folder>/checkpoint/step-N/`.
"""

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, final

import torch
import torch.distributed as dist

from components.checkpoint import dcp
from components.checkpoint.dcp import CheckpointError, Views
from components.checkpoint.folder import (
    VALUES,
    Marker,
    damage,
    file_facts,
    is_complete,
    is_remains,
    read_marker,
    remove,
    set_aside,
    step_folder,
    steps_in,
    write_marker,
    write_synced,
)

T = TypeVar("T")
Values = dict[str, Any]  # JSON-able

log = logging.getLogger(__name__)


@final
class Checkpointer:
    """All checkpoints in `root`. Every method is collective: all ranks call it, with the same step.

    keep_latest_k: how many of the newest are kept; 0 keeps all. keep_best: also the last one saved as best.
    Needs an initialised process group. Raises CheckpointError, the same on every rank.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep_latest_k: int = 0,
        keep_best: bool = True,
        async_mode: Literal["disabled", "async"] = "disabled",
    ) -> None:
        self.root = Path(root)
        self.keep_latest_k, self.keep_best = keep_latest_k, keep_best
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self._background = ThreadPoolExecutor(1, "checkpoint") if async_mode == "async" else None
        self._writing: Future | None = None
        self._at = -1  # the step that was saved or restored last
        self._verified: int | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The gloo group of all ranks, for small exchanges beside a save (random states). Waits for a save in the
        background: two threads must not use one group at once."""
        self.wait()
        return self._group

    def save(self, step: int, tensors: Views, values: Values, *, best: bool = False) -> None:
        """Write checkpoint `step`. Saving again what was saved or restored last does nothing.

        `tensors` (state.py) are written by logical name; `values` is JSON. `best` marks the best one so far, which
        outlives pruning. Checkpoints of later steps belong to a continuation that this run went back behind: they are
        set aside under another name. With async_mode, returns once the tensors are copied.
        """
        self.wait()
        if step == self._at:
            return
        text = json.dumps(values)
        if self._background is None:
            self._write(step, tensors, text, best)
        else:
            self._writing = self._background.submit(self._write, step, _copied(tensors), text, best)

    def wait(self) -> None:
        """Until a save in the background is complete; raises what it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def latest(self) -> int | None:
        """The newest step whose checkpoint is complete and undamaged, or None where there was no save.

        Newer ones that are not are named in a warning. Raises CheckpointError if all that were ever complete are
        damaged: to start afresh is then a person's decision.
        """
        self.wait()
        problems = []
        for step in reversed(self._on_first(lambda: steps_in(self.root))):
            try:
                self._verify(step)
                return step
            except CheckpointError as error:
                if self._on_first(lambda at=step: is_complete(step_folder(self.root, at))):
                    problems.append(str(error))
                if dist.get_rank(self._group) == 0:
                    log.warning("%s; trying the one before", error)
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.root} can be used (move them away to start afresh): {problems[0]}"
            )
        return None

    def best(self) -> int | None:
        """The step of the last complete checkpoint that was saved as best."""
        self.wait()
        return self._on_first(lambda: _best(self._markers()))

    def values(self, step: int) -> Values:
        """What `save` was given as values. Reads no tensor: a model can be built from the recipe in it first."""
        self.wait()
        self._verify(step)
        return self._on_first(lambda: json.loads((step_folder(self.root, step) / VALUES).read_text()))

    def load(self, step: int, tensors: Views, *, strict: bool = True, ignore: tuple[str, ...] = ()) -> Values:
        """Fill `tensors` in place from checkpoint `step` and return its values.

        The names must be the checkpoint's, but for those that start with one of `ignore` (("optimizer.",) loads
        weights only). strict=False loads what both have and warns of the rest. Shapes must agree always; dtypes are
        converted. Checksums are verified before anything is changed.
        """
        values = self.values(step)
        folder = step_folder(self.root, step)
        saved = self._on_first(lambda: dcp.saved_shapes(folder))
        here = self._all_shapes(tensors)
        _check_shapes(folder, saved, here)
        complaint = _different_names(folder, {name for name in saved if not name.startswith(ignore)}, set(here))
        if complaint and strict:
            raise CheckpointError(complaint)
        if complaint and dist.get_rank(self._group) == 0:
            log.warning(complaint)
        dcp.read(folder, {name: view for name, view in tensors.items() if name in saved}, self._group)
        self._at = step
        return values

    # The steps of a save ------------------------------------------------------------------------------

    def _write(self, step: int, tensors: Views, values: str, best: bool) -> None:
        folder = step_folder(self.root, step)
        self._on_first(lambda: self._begin(folder, values))
        dcp.write(folder, tensors, self._group)
        own = f"__{dist.get_rank(self._group)}_*.distcp"
        facts = self._on_all(lambda: file_facts(folder, [path.name for path in folder.glob(own)]))
        files = {name: fact for part in facts for name, fact in part.items()}
        self._on_first(lambda: self._finish(folder, Marker(step, best, files)))
        self._at, self._verified = step, None

    def _begin(self, folder: Path, values: str) -> None:
        """Make way for `folder`: nothing may stay that is newer than what this run saved or restored last."""
        for step in steps_in(self.root):
            other = step_folder(self.root, step)
            if step > self._at and is_remains(other):
                remove(other)
            elif step > self._at:
                log.warning("%s is no part of this run's history: renamed to %s", other, set_aside(other).name)
        folder.mkdir(parents=True)
        write_synced(folder / VALUES, values)

    def _finish(self, folder: Path, marker: Marker) -> None:
        files = marker.files | file_facts(folder, [VALUES, ".metadata"])
        write_marker(folder, replace(marker, files=files))
        self._prune()

    def _prune(self) -> None:
        markers = self._markers()
        kept = set(sorted(markers)[-self.keep_latest_k :])  # all of them where keep_latest_k is 0
        if self.keep_best:
            kept.add(_best(markers))
        for step in steps_in(self.root):
            folder = step_folder(self.root, step)
            if is_remains(folder) or (step in markers and step not in kept):
                remove(folder)

    def _markers(self) -> dict[int, Marker]:
        """The markers that can be read, by step."""
        markers = {}
        for step in steps_in(self.root):
            with suppress(CheckpointError):
                markers[step] = read_marker(step_folder(self.root, step))
        return markers

    # What the ranks must agree on ---------------------------------------------------------------------

    def _verify(self, step: int) -> None:
        """Raises CheckpointError, on every rank, if any file of the checkpoint is damaged; each rank reads a share."""
        if step == self._verified:
            return
        folder = step_folder(self.root, step)
        marker = self._on_first(lambda: read_marker(folder))
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        mine = dict(list(marker.files.items())[rank::ranks])
        found = [clause for clause in self._on_all(lambda: damage(folder, mine)) if clause]
        if found:
            raise CheckpointError(f"{folder} is damaged: {found[0]}")
        self._verified = step

    def _all_shapes(self, tensors: Views) -> dict[str, tuple[int, ...]]:
        parts = self._on_all(lambda: {name: view.shape for name, view in tensors.items()})
        return {name: shape for part in parts for name, shape in part.items()}

    def _on_all(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, on every rank; one rank's exception is raised on all instead of a hang."""
        outcomes: list = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(outcomes, self._outcome(work), group=self._group)
        return [_value(outcome) for outcome in outcomes]

    def _on_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on every rank; so is its exception."""
        box = [self._outcome(work) if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return _value(box[0])

    def _outcome(self, work: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
        try:
            return work(), None
        except CheckpointError as error:
            return None, error
        except Exception as error:
            return None, CheckpointError(f"{self.root}: {error}")


def _value(outcome: tuple[T | None, CheckpointError | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _best(markers: dict[int, Marker]) -> int | None:
    return max((step for step, marker in markers.items() if marker.best), default=None)


def _copied(tensors: Views) -> Views:
    """The same parts in host memory of their own, so that training may go on."""
    return {
        name: replace(view, local=view.local.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))
        for name, view in tensors.items()
    }


def _check_shapes(folder: Path, saved: dict[str, tuple], here: dict[str, tuple]) -> None:
    for name in sorted(saved.keys() & here.keys()):
        if saved[name] != here[name]:
            raise CheckpointError(
                f"{name} has shape {saved[name]} in {folder} but {here[name]} in this recipe; the recipes differ"
            )


def _different_names(folder: Path, saved: set[str], here: set[str]) -> str | None:
    lacks, extra = _some(here - saved), _some(saved - here)
    if not lacks and not extra:
        return None
    clauses = ([f"lacks {lacks}"] if lacks else []) + ([f"has, and this recipe has not, {extra}"] if extra else [])
    return f"{folder} does not fit this recipe: it {', and '.join(clauses)}"


def _some(names: set[str], shown: int = 3) -> str:
    listed = ", ".join(sorted(names)[:shown])
    return f"{listed} and {len(names) - shown} more" if len(names) > shown else listed
