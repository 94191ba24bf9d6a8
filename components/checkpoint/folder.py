"""One checkpoint on disk, `step-N/`, and what makes it count: a marker written last.

    values.json                what is no tensor; written first
    __R_N.distcp, .metadata    torch.distributed.checkpoint: the tensors
    COMPLETE                   JSON: format version, step, whether it was the best so far, size and SHA-256 of each file

A folder without a marker is the remains of a save that was interrupted, or another program's. The marker appears in
one instant (written aside, synced, renamed) after every other file is on disk. Nothing here talks to other ranks.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from components.checkpoint.dcp import CheckpointError

FORMAT = 1
MARKER = "COMPLETE"
VALUES = "values.json"

FileFacts = dict[str, tuple[int, str]]  # file name -> (bytes, SHA-256)


@dataclass(frozen=True)
class Marker:
    step: int
    best: bool
    files: FileFacts
    format: int = FORMAT


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def steps_in(root: Path) -> list[int]:
    """The steps that have a folder, complete or not, in order."""
    found = (path.name.removeprefix("step-") for path in root.glob("step-*") if path.is_dir())
    return sorted(int(step) for step in found if step.isdecimal())


def locate(path: Path) -> tuple[Path, int | None]:
    """The folder of checkpoints and the step that `path` means: a `step-N`, a folder of them (step None: the newest),
    or a dump folder."""
    step = path.name.removeprefix("step-")
    if step != path.name and step.isdecimal():
        return path.parent, int(step)
    return (path / "checkpoint" if (path / "checkpoint").is_dir() else path), None


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def is_remains(folder: Path) -> bool:
    """Whether this is what an interrupted save left. Without values.json it is not ours to delete."""
    names = {path.name for path in folder.iterdir()}
    return MARKER not in names and (VALUES in names or names <= {_aside(folder / VALUES).name})


def read_marker(folder: Path) -> Marker:
    """Raises CheckpointError for a folder that is missing, incomplete, foreign, of another format, or garbled."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}")
    if not is_complete(folder):
        raise CheckpointError(
            f"{folder} has no {MARKER} marker: its save was interrupted, or another program wrote it; it cannot be used"
        )
    try:
        found = json.loads((folder / MARKER).read_text())
        if found["format"] == FORMAT:
            return Marker(**found)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder / MARKER} is not a marker of this program, or is damaged") from None
    raise CheckpointError(
        f"{folder} has checkpoint format {found['format']}, this program reads format {FORMAT}; use the version of "
        "this repository that wrote it"
    )


def write_marker(folder: Path, marker: Marker) -> None:
    """From this instant the checkpoint exists."""
    write_synced(folder / MARKER, json.dumps(asdict(marker), indent=1))
    _sync_folder(folder.parent)


def file_facts(folder: Path, names: Iterable[str]) -> FileFacts:
    names = list(names)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: _sha256(folder / name), names)
        return {name: ((folder / name).stat().st_size, digest) for name, digest in zip(names, digests, strict=True)}


def damage(folder: Path, facts: FileFacts) -> str | None:
    """What is wrong with the files that `facts` describe, as a clause, or None."""
    for name, (size, digest) in facts.items():
        path = folder / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if _sha256(path) != digest:
                return f"{name} does not match its checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on disk, whole, when it gets its name."""
    aside = _aside(path)
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _sync_folder(path.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint. It stops counting at once; what is killed halfway, the next removal ends."""
    gone = folder.with_name(f"removed-{folder.name}")
    for unfinished in folder.parent.glob("removed-step-*"):
        shutil.rmtree(unfinished)
    folder.rename(gone)
    shutil.rmtree(gone)


def set_aside(folder: Path) -> Path:
    """Rename a complete checkpoint so that it is found by people only; returns the new path."""
    aside = _free(lambda n: folder.with_name(f"aside-{n}-{folder.name}"))
    folder.rename(aside)
    _sync_folder(folder.parent)
    return aside


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def _free(path: Callable[[int], Path]) -> Path:
    number = 1
    while path(number).exists():
        number += 1
    return path(number)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
