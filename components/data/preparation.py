"""From sources to verified shards: select, filter, drop duplicates, split, tokenize in parallel, write; resumable.

    rows (this process) -> chunks -> encode_rows (worker processes) -> in order again -> new? -> split -> shard writer

Every few seconds the journal commits the position in the source together with the length of every open file, so a
kill at any moment costs those seconds and nothing else: the shards come out the same, byte for byte. Memory is a few
chunks for each worker and SQLite's page cache, whatever the size of the corpus.

Sources are prepared in the order of their table, and a text that an earlier one holds is not taken again.
Left out on purpose: near-duplicates (MinHash), language identification and quality models; use a corpus that had them.
"""

import json
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import pairwise
from multiprocessing import get_context, parent_process
from os import _exit
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from components.data.documents import Encoded, Selection, encode_rows
from components.data.journal import Journal
from components.data.shard_writer import ShardWriter
from components.data.shards import SHARD_TOKENS, Manifest
from components.data.sources import Chunk, Position, Row, Source, SourceError, origin
from components.data.splits import check_fractions, split_of
from components.data.tokenizers import Tokenizer
from registry import Component, parse_component

COMMIT_SECONDS = 5.0
CHUNKS_AHEAD = 2  # for each worker


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """One source of the mixture: where its rows are, which are wanted, and how much of the whole they make."""

    read: Annotated[Component, "source"]  # where the rows come from
    weight: float = 1.0  # share of target_tokens, relative to the other sources
    select: Selection = field(default_factory=Selection)  # which field, which filters

    def __post_init__(self):
        if not self.weight > 0:
            raise ValueError(f"weight must be above 0, not {self.weight}; remove the source to leave it out")


@dataclass(frozen=True, kw_only=True)
class OutputSection:
    """What is made of the sources."""

    folder: str  # each source gets a folder of its name in it
    target_tokens: int = 0  # training tokens of the whole mixture; each source gives its weight of them; 0 takes all
    splits: dict[str, float] = field(  # fractions of documents
        default_factory=lambda: {"train": 0.97, "validation": 0.015, "test": 0.015}
    )
    shard_tokens: int = SHARD_TOKENS  # tokens of a full shard

    def __post_init__(self):
        check_fractions(self.splits)
        if self.shard_tokens < 1 or self.target_tokens < 0:
            raise ValueError("shard_tokens must be above 0 and target_tokens not negative")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A file of `train_configs/data/`: what `recipes.prepare_data` does."""

    output: OutputSection
    tokenizer: Annotated[Component, "tokenizer"]  # whose ids the shards hold
    sources: dict[str, SourceTable]
    imports: tuple[str, ...] = ()  # modules outside this repository whose sources and tokenizers register themselves

    def __post_init__(self):
        if not self.sources:
            raise ValueError("at least one source is needed; add a table [sources.NAME]")

    def folder(self, name: str) -> Path:
        return Path(self.output.folder) / name

    def share(self, name: str) -> float:
        return self.sources[name].weight / sum(s.weight for s in self.sources.values())

    def target(self, name: str) -> int | None:
        """Training tokens wanted of a source; None for all it has."""
        return round(self.output.target_tokens * self.share(name)) if self.output.target_tokens else None


# Workers --------------------------------------------------------------------------------------------------------------


class Here(Executor):
    """Runs each task when it is submitted, in this process: no workers."""

    def submit(self, task: Callable, *arguments: Any) -> Future:
        done: Future = Future()
        done.set_result(task(*arguments))
        return done


_tokenizer: Tokenizer | None = None  # of this process: built once, not sent with every chunk


def _start_worker(tokenizer: Component) -> None:
    global _tokenizer
    _tokenizer = tokenizer.build()
    parent = parent_process()
    if parent is not None:  # an interrupt is the parent's to handle; a killed parent must not leave workers behind
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=lambda: (parent.join(), _exit(1)), daemon=True).start()


def _encode(rows: list[Row], selection: Selection) -> Encoded:
    return encode_rows(rows, selection, _tokenizer)


def workers(number: int, tokenizer: Component) -> Executor:
    """An executor of `number` processes that hold the tokenizer; 0 works in this process."""
    if number == 0:
        _start_worker(tokenizer)
        return Here()
    return ProcessPoolExecutor(number, get_context("spawn"), _start_worker, (tokenizer,))


def encoded(
    chunks: Iterator[Chunk], selection: Selection, pool: Executor, ahead: int
) -> Iterator[tuple[Position, Encoded]]:
    """What the workers make of the chunks, in order, at most `ahead` of them under way."""
    waiting: deque[tuple[Position, Future]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk.position, pool.submit(_encode, chunk.rows, selection)))
            if len(waiting) > ahead:
                position, future = waiting.popleft()
                yield position, future.result()
        while waiting:
            position, future = waiting.popleft()
            yield position, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


# One source -----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the documents of a source. `refused` counts by reason, `places` has an example of each."""

    kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)

    def add_refused(self, found: Encoded) -> None:
        self.refused.update(found.refused)
        for reason, place in found.places.items():
            self.places.setdefault(reason, place)

    def counts(self) -> dict[str, int]:
        return {"read": self.kept + self.refused.total(), "kept": self.kept, **self.refused}


class SourceRun:
    """The preparation of one source, from the start or from its last commit."""

    def __init__(self, plan: Preparation, name: str, tokenizer: Tokenizer, journal: Journal):
        """Raises SourceError if the table has changed since the last commit."""
        self.plan, self.name, self.tokenizer, self.journal = plan, name, tokenizer, journal
        self.table, self.folder, self.target = plan.sources[name], plan.folder(name), plan.target(name)
        self.asked = asked(plan, name, tokenizer)
        state = self._earlier_state() or self._first_state()
        self.source: Source = parse_component("source", state["source"]).build()
        self.position: Position | None = state["position"]
        self.tally = Tally(state["kept"], Counter(state["refused"]), state["places"])
        self.writers = {
            split: ShardWriter(
                self.folder, split, tokenizer.vocab_size, plan.output.shard_tokens, state["writers"].get(split)
            )
            for split in plan.output.splits
        }

    @property
    def tokens(self) -> int:
        """Training tokens written."""
        return self.writers["train"].total_tokens

    def run(self, pool: Executor, ahead: int, report: Callable[[int], None]) -> Manifest:
        """Prepare what is left; `report` is told the training tokens so far. Leaves a manifest behind.

        Raises SourceError if the source gives nothing, OSError if the disk is full: then the last commit holds.
        """
        try:
            self._take_all(pool, ahead, report)
            if not self.tally.kept:
                raise SourceError(f"source {self.name} gave no document: {summary(self.tally)}")
            return self._complete()
        finally:
            for writer in self.writers.values():
                writer.close()

    def _take_all(self, pool: Executor, ahead: int, report: Callable[[int], None]) -> None:
        last_commit = time.monotonic()
        self.journal.begin()
        for position, found in encoded(self.source.chunks(self.position), self.table.select, pool, ahead):
            if self._full():
                break
            self._take(found)
            self.position = position
            report(self.tokens)
            if time.monotonic() - last_commit > COMMIT_SECONDS:
                self.journal.commit(self.name, self._state())
                self.journal.begin()
                last_commit = time.monotonic()
        self.journal.commit(self.name, self._state())

    def _full(self) -> bool:
        return self.target is not None and self.tokens >= self.target

    def _take(self, found: Encoded) -> None:
        """Write the new documents of a chunk, up to the one that reaches the target."""
        self.tally.add_refused(found)
        self._check_first(found)
        starts = np.concatenate([[0], np.cumsum(found.lengths)])
        for (begin, end), digest in zip(pairwise(starts), found.digests, strict=True):
            if self._full():
                return
            if not self.journal.is_new(digest, self.name):
                self.tally.refused["duplicate"] += 1
                continue
            self.writers[split_of(digest, self.plan.output.splits)].add(found.tokens[begin:end])
            self.tally.kept += 1

    def _check_first(self, found: Encoded) -> None:
        """A source whose first rows are all broken in the same way is wrongly described, not damaged."""
        reason, count = found.refused.most_common(1)[0] if found.refused else ("", 0)
        alike = count == found.refused.total() + len(found.lengths)
        if self.position is None and alike and reason.startswith("broken"):
            raise SourceError(
                f"source {self.name}: every one of its first {count} rows is {reason} (first: {found.places[reason]}); "
                "correct its table"
            )

    def _complete(self) -> Manifest:
        terms = {"select": asdict(self.table.select), "asked": self.asked}
        manifest = Manifest.of(
            self.name,
            self.tokenizer,
            splits=self.plan.output.splits,
            shards=tuple(shard for writer in self.writers.values() for shard in writer.complete()),
            counts=self.tally.counts(),
            origin=origin(self.source, self.table.read.name) | terms,
        )
        manifest.write(self.folder)
        return manifest

    def _state(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "source": origin(self.source, self.table.read.name),
            "position": self.position,
            "kept": self.tally.kept,
            "refused": self.tally.refused,
            "places": self.tally.places,
            "writers": {split: writer.state() for split, writer in self.writers.items()},
        }

    def _earlier_state(self) -> dict[str, Any] | None:
        state = self.journal.state(self.name) if self.folder.is_dir() else None
        if state is None or state["asked"] == self.asked:
            return state
        if state["kept"]:
            raise SourceError(
                f"source {self.name} was begun with another table, tokenizer or split; restore them to go on, or "
                f"delete {self.folder} to prepare it from the start"
            )
        shutil.rmtree(self.folder)  # an attempt with a wrong table, which took nothing
        return None

    def _first_state(self) -> dict[str, Any]:
        """Written down before the folder is made, so that a folder without a state is never ours to delete."""
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise SourceError(f"{self.folder} holds files of something else; delete it or name another output folder")
        source = self.table.read.build().pinned()
        came_from = origin(source, self.table.read.name)
        state = {"asked": self.asked, "source": came_from, "position": None, "kept": 0, "refused": {}, "places": {}}
        self.journal.forget(self.name)
        self.journal.begin()
        self.journal.commit(self.name, state | {"writers": {}})
        self.folder.mkdir(parents=True, exist_ok=True)
        return state | {"writers": {}}


def asked(plan: Preparation, name: str, tokenizer: Tokenizer) -> str:
    """A hash of everything that decides the shards of a source, so that nothing is resumed under other terms."""
    table = plan.sources[name]
    terms = [
        origin(table.read.build(), table.read.name),
        asdict(table.select),
        tokenizer.hash,
        plan.output.splits,
        plan.output.shard_tokens,
        plan.target(name),
    ]
    return sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()[:16]


def is_prepared(plan: Preparation, name: str, tokenizer: Tokenizer) -> bool:
    """Whether a source is there in full. Raises SourceError if it was made from another table, tokenizer or split."""
    folder = plan.folder(name)
    if not (folder / "manifest.json").is_file():
        return False
    if Manifest.read(folder).origin.get("asked") != asked(plan, name, tokenizer):
        raise SourceError(
            f"{folder} was prepared from another table, tokenizer or split; delete it to prepare it again, or name "
            "another output folder"
        )
    return True


def summary(tally: Tally) -> str:
    """Documents read, kept and refused, in a line."""
    return ", ".join(f"{count:,} {reason}" for reason, count in tally.counts().items())
