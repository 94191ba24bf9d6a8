"""Where text comes from: the hub, parquet, jsonl, plain text, a folder of code. Kind "source".

A source is a row of rows in a fixed order, given in chunks. With each chunk comes a position (JSON) from which a new
process goes on with the next row: nothing is read twice, nothing is left out, whatever killed the first one.

A row that cannot be read is given as `Broken` with its place, and counted; a file that ends too early gives what it
holds. Only what makes a whole source useless raises SourceError.
Left out on purpose: shuffling. Order is the mixture's task, over windows, at training time.
"""

import contextlib
import gzip
import io
import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from registry import register

CHUNK_ROWS = 1024
CHUNK_CHARACTERS = 4_000_000  # what bounds memory where documents are books

Row = dict[str, Any]
Position = dict[str, Any]


class SourceError(ValueError):
    """A source that cannot be read, and the remedy, in one sentence."""


@dataclass(frozen=True)
class Broken:
    """A row that could not be read: why (one of few words, for counting), and where."""

    reason: str
    place: str


@dataclass(frozen=True)
class Chunk:
    rows: list[Row | Broken]
    position: Position  # after the last row


class Source(ABC):
    """Rows in a fixed order, resumable at every chunk."""

    config: Any

    @abstractmethod
    def chunks(self, position: Position | None = None) -> Iterator[Chunk]:
        """Chunks from the beginning, or from a position that an earlier chunk came with."""

    @abstractmethod
    def describe(self) -> str:
        """What would be read, from where, how large: one line. Does not need a network."""

    def pinned(self) -> "Source":
        """This source with every moving reference (a branch of a hub repository) replaced by what it is now."""
        return self


# Files ---------------------------------------------------------------------------------------------------------------


class Files(Source):
    """Rows from files, sorted by path; position is the file and how many of its rows were given."""

    def __init__(self, config):
        self.config = config

    @abstractmethod
    def paths(self) -> list[Path]:
        """The files in order. Raises SourceError if there is none."""

    @abstractmethod
    def rows(self, path: Path) -> Iterator[Row | Broken]: ...

    def chunks(self, position: Position | None = None) -> Iterator[Chunk]:
        paths = self.paths()
        first, skip = _found(paths, position) if position else (0, 0)
        rows, characters = [], 0
        for number in range(first, len(paths)):
            for given, row in enumerate(self.rows(paths[number]), start=1):
                if number == first and given <= skip:
                    continue
                rows.append(row)
                characters += _characters(row)
                if len(rows) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                    yield Chunk(rows, {"file": str(paths[number]), "row": given})
                    rows, characters = [], 0
        if rows:
            yield Chunk(rows, {"file": str(paths[-1]), "row": given})

    def describe(self) -> str:
        paths = self.paths()
        size = sum(p.stat().st_size for p in paths)
        return f"{len(paths):,} files, {size / 1e6:,.1f} MB on disk, {paths[0]} to {paths[-1].name}"


def _found(paths: list[Path], position: Position) -> tuple[int, int]:
    if Path(position["file"]) not in paths:
        raise SourceError(
            f"{position['file']} was read before and is gone; put it back to go on, or prepare from the start"
        )
    return paths.index(Path(position["file"])), position["row"]


def _characters(row: Row | Broken) -> int:
    return 0 if isinstance(row, Broken) else sum(len(v) for v in row.values() if isinstance(v, str))


def matching(patterns: tuple[str, ...]) -> list[Path]:
    """Files of glob patterns (`**` for any depth), each once, sorted. Raises SourceError if there is none."""
    found: set[Path] = set()
    for pattern in patterns:
        absolute = Path(pattern).is_absolute()
        base, rest = (Path("/"), pattern[1:]) if absolute else (Path(), pattern)
        found.update(path for path in base.glob(rest) if path.is_file())
    if not found:
        raise SourceError(f"no file matches {', '.join(patterns)}; check the paths, from {Path.cwd()}")
    return sorted(found)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file for reading bytes, decompressed if its first bytes say gzip or zstd, whatever its name."""
    with open(path, "rb") as raw:
        magic = raw.peek(4)[:4]
        if magic[:2] == b"\x1f\x8b":
            with gzip.open(raw) as file:
                yield file
        elif magic == b"\x28\xb5\x2f\xfd":
            import pyarrow  # comes with datasets

            with pyarrow.CompressedInputStream(raw, "zstd") as file:
                yield io.BufferedReader(file)
        else:
            yield raw


def lines(path: Path) -> Iterator[bytes | Broken]:
    """Lines of a file; after an error of decompression, what was read stays and one `Broken` follows."""
    number = 0
    try:
        with opened(path) as file:
            for line in file:
                number += 1
                yield line
    except (OSError, EOFError, zlib.error) as error:
        yield Broken("file cut short", f"{path} after line {number}: {error}")


@register("source", "jsonl", example={"files": ["assets/corpus/*.jsonl.gz"]})
class Jsonl(Files):
    """A JSON object a line; plain, gzip or zstd, told by the file's first bytes."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        files: tuple[str, ...]  # glob patterns, from the working directory

    def paths(self) -> list[Path]:
        return matching(self.config.files)

    def rows(self, path: Path) -> Iterator[Row | Broken]:
        for number, line in enumerate(lines(path), start=1):
            if isinstance(line, Broken):
                yield line
            elif line.strip():
                yield _json_row(line, f"{path} line {number}")


def _json_row(line: bytes, place: str) -> Row | Broken:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Broken("not UTF-8", place)
    except ValueError:
        return Broken("not JSON", place)
    return row if isinstance(row, dict) else Broken("not a JSON object", place)


@register("source", "txt", example={"files": ["README.md"]})
class Txt(Files):
    """Plain text: a file is a document, or is cut at blank lines into documents of about `cut` characters."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        files: tuple[str, ...]  # glob patterns, from the working directory; gzip and zstd are decompressed
        cut: int = 0  # characters after which a document ends at the next blank line; 0 keeps files whole

    def paths(self) -> list[Path]:
        return matching(self.config.files)

    def rows(self, path: Path) -> Iterator[Row | Broken]:
        held, size = [], 0
        for line in lines(path):
            if isinstance(line, Broken):
                yield line
                continue
            held.append(line)
            size += len(line)
            if self.config.cut and size >= self.config.cut and not line.strip():
                yield _text_row(held, path)
                held, size = [], 0
        if held:
            yield _text_row(held, path)


def _text_row(held: list[bytes], path: Path) -> Row | Broken:
    try:
        return {"text": b"".join(held).decode("utf-8"), "path": str(path)}
    except UnicodeDecodeError:
        return Broken("not UTF-8", str(path))


@register("source", "code_folder", example={"folder": "components", "extensions": [".py"]})
class CodeFolder(Files):
    """A folder of source code: a file is a document."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        folder: str  # taken with everything below it
        extensions: tuple[str, ...]  # of the files to take, with the dot
        exclude: tuple[str, ...] = ()  # patterns of paths, from the folder, to leave out
        largest: int = 1_000_000  # bytes; larger files are mostly generated

    def paths(self) -> list[Path]:
        if not Path(self.config.folder).is_dir():
            raise SourceError(f"{self.config.folder} is not a folder; check the path, from {Path.cwd()}")
        taken = [Path(entry.path) for entry in self._walk(self.config.folder) if self._wanted(entry)]
        if not taken:
            raise SourceError(
                f"{self.config.folder} holds no file with an extension of {', '.join(self.config.extensions)}"
            )
        return taken

    def _walk(self, folder: str) -> Iterator[os.DirEntry]:
        """Files below a folder, by name; links are not followed. (`rglob` takes seconds for a kernel's sources.)"""
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry

    def _wanted(self, entry: os.DirEntry) -> bool:
        if not entry.name.endswith(self.config.extensions) or entry.stat().st_size > self.config.largest:
            return False
        name = os.path.relpath(entry.path, self.config.folder) if self.config.exclude else ""
        return not any(fnmatch(name, pattern) for pattern in self.config.exclude)

    def rows(self, path: Path) -> Iterator[Row | Broken]:
        try:
            yield _text_row([path.read_bytes()], path)
        except OSError as error:
            yield Broken("cannot be read", f"{path}: {error}")


# Hugging Face `datasets` ---------------------------------------------------------------------------------------------


class Streamed(Source):
    """Rows of a streaming `datasets` data set; position is its own state."""

    def __init__(self, config):
        self.config = config

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Of `datasets.load_dataset`."""

    def chunks(self, position: Position | None = None) -> Iterator[Chunk]:
        stream = self._load()
        if position:
            stream.load_state_dict(position)
        rows, characters = [], 0
        try:
            for row in stream:
                rows.append(row)
                characters += _characters(row)
                if len(rows) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                    yield Chunk(rows, stream.state_dict())
                    rows, characters = [], 0
        except Exception as error:  # pyarrow, datasets and the network each have their own
            raise SourceError(
                f"{self.describe()}: reading stopped ({_first_line(error)}); run again to go on"
            ) from error
        if rows:
            yield Chunk(rows, stream.state_dict())

    def _load(self):
        import datasets

        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(**self.arguments(), streaming=True)
        except Exception as error:  # datasets, its builders and the network each have their own
            raise SourceError(f"{self.describe()} cannot be opened: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@register("source", "hub", example={"path": "HuggingFaceFW/fineweb-edu"})
class Hub(Streamed):
    """A data set of the Hugging Face hub (or a local copy of its files), streamed."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str  # repository on the hub, or a folder with the same files
        subset: str | None = None  # the data set's configuration, where it has several
        data_dir: str | None = None  # folder inside the repository, where only a part is wanted
        data_files: tuple[str, ...] = ()  # file patterns inside the repository, or addresses with path = "json"
        split: str = "train"  # of the data set; what is held out is decided here, by document
        revision: str = "main"  # commit, tag or branch; a branch is pinned to its commit when preparation begins

    def arguments(self) -> dict[str, Any]:
        c = self.config
        given = {"path": c.path, "name": c.subset, "data_dir": c.data_dir, "split": c.split}
        if c.data_files:
            given["data_files"] = list(c.data_files)
        if self._on_hub():
            given["revision"] = c.revision
        return given

    def pinned(self) -> "Hub":
        if not self._on_hub() or re.fullmatch(r"[0-9a-f]{40}", self.config.revision):
            return self
        from huggingface_hub import HfApi

        try:
            commit = HfApi().dataset_info(self.config.path, revision=self.config.revision).sha
        except Exception as error:  # the client and the network each have their own
            raise SourceError(f"{self.describe()} cannot be reached: {_first_line(error)}") from error
        return Hub(replace(self.config, revision=commit))

    def describe(self) -> str:
        c = self.config
        parts = [c.subset, c.data_dir, *c.data_files[:2], "…" if len(c.data_files) > 2 else None, f"split {c.split}"]
        elsewhere = f"local copy {c.path}" if Path(c.path).exists() else f"{c.path} files"
        where = f"hub {c.path}@{c.revision}" if self._on_hub() else elsewhere
        return f"{where} ({', '.join(p for p in parts if p)})"

    def _on_hub(self) -> bool:
        return not Path(self.config.path).exists() and "/" in self.config.path


@register("source", "parquet", example={"files": ["data/*.parquet"]})
class Parquet(Streamed):
    """Local parquet files."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        files: tuple[str, ...]  # glob patterns, from the working directory

    def arguments(self) -> dict[str, Any]:
        return {"path": "parquet", "data_files": [str(p) for p in matching(self.config.files)], "split": "train"}

    def describe(self) -> str:
        paths = matching(self.config.files)
        size = sum(p.stat().st_size for p in paths)
        return f"{len(paths):,} parquet files, {size / 1e6:,.1f} MB on disk, {paths[0]} to {paths[-1].name}"


def origin(source: Source, name: str) -> dict[str, Any]:
    """What a manifest says of where its text came from."""
    return {"name": name, **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(source.config).items()}}
