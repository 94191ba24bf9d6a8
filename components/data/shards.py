"""Token shards on disk: what they are, writing them, and reading any window of them without loading the rest.

A prepared source is one folder:

    manifest.json          what is here: shards with counts and hashes, tokenizer, split fractions, filter counts
    train-00000.bin        tokens, little-endian uint16 (vocabulary up to 65,536) or uint32, documents end to end
    train-00000.idx        int64 start of each document in the .bin file, then its number of tokens
    validation-00000.bin …

Every document is its tokens and then the tokenizer's end id; no document crosses a shard. None is shorter than
`MIN_DOCUMENT` tokens, so that a window can hold only so many documents and tables of them have a fixed size.

A *window* is `seq_len` + 1 tokens; windows start `seq_len` tokens apart, so every token but a shard's first few
thousand leftovers is a target exactly once. Windows do not cross shards.

Left out on purpose: compression (the page cache is the buffer, random access the need) and appending to a folder
(a source is prepared once; `components/data/preparation.py`).
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from components.data.tokenizers import Tokenizer

FORMAT = 1
SPLITS = ("train", "validation", "test")
MIN_DOCUMENT = 16  # tokens, the end id included
SHARD_TOKENS = 50_000_000


class ShardError(ValueError):
    """A folder of shards that cannot be used, and the remedy, in one sentence."""


@dataclass(frozen=True)
class Shard:
    """One pair of files. `sha256` is of the .bin file."""

    name: str  # file name without extension
    split: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json: everything a reader must know before it trusts the shards."""

    source: str
    tokenizer: str  # name of its class
    tokenizer_hash: str
    vocab_size: int
    end_id: int
    splits: dict[str, float]  # fractions of documents
    shards: tuple[Shard, ...]
    counts: dict[str, int] = field(default_factory=dict)  # documents read, kept, and refused by reason
    origin: dict = field(default_factory=dict)  # where the text came from, as its source table says
    format: int = FORMAT

    @staticmethod
    def of(
        source: str,
        tokenizer: Tokenizer,
        splits: dict[str, float],
        shards: tuple[Shard, ...],
        counts: dict,
        origin: dict,
    ) -> "Manifest":
        name, size, end = type(tokenizer).__name__, tokenizer.vocab_size, tokenizer.end_id
        return Manifest(source, name, tokenizer.hash, size, end, splits, shards, counts, origin)

    def check_tokenizer(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises ShardError if the shards hold ids of another tokenizer."""
        if self.tokenizer_hash != tokenizer.hash:
            theirs = f"{self.tokenizer} ({self.vocab_size} ids, hash {self.tokenizer_hash[:12]})"
            ours = f"{type(tokenizer).__name__} ({tokenizer.vocab_size} ids, hash {tokenizer.hash[:12]})"
            raise ShardError(
                f"{folder} was tokenized with {theirs}, the recipe's tokenizer is {ours}; prepare the source again "
                "with it, or change [tokenizer]"
            )

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    def tokens(self, split: str) -> int:
        return sum(s.tokens for s in self.shards if s.split == split)

    def write(self, folder: Path) -> None:
        """Atomically: a manifest that is there is complete."""
        content = asdict(self) | {"dtype": self.dtype.name}
        write_atomically(folder / "manifest.json", (json.dumps(content, indent=1) + "\n").encode())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Raises ShardError if the manifest is missing, damaged or of another format."""
        path = folder / "manifest.json"
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ShardError(
                f"{path} does not exist; prepare the source with `python -m recipes.prepare_data`"
            ) from None
        except (ValueError, OSError) as error:
            raise ShardError(f"{path} cannot be read ({error}); prepare the source again") from None
        if content.get("format") != FORMAT:
            raise ShardError(
                f"{path} has format {content.get('format')}, this version reads {FORMAT}; prepare it again"
            )
        try:
            content.pop("dtype", None)  # follows from the vocabulary; written for other readers
            shards = tuple(Shard(**s) for s in content.pop("shards"))
            return Manifest(shards=shards, **content)
        except (KeyError, TypeError) as error:
            raise ShardError(f"{path} lacks or has unknown entries ({error}); prepare the source again") from None


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a reader or a crash sees the old file or the new one, never a part."""
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_shard(folder: Path, name: str, split: str, documents: list[np.ndarray], vocab_size: int) -> Shard:
    """One shard of whole documents (each a 1-D integer array that ends with the end id), written atomically.

    Raises ValueError for a document shorter than `MIN_DOCUMENT`.
    """
    lengths = np.array([len(d) for d in documents], dtype=np.int64)
    if len(lengths) == 0 or lengths.min() < MIN_DOCUMENT:
        raise ValueError(f"shard {name}: every document needs at least {MIN_DOCUMENT} tokens; filter shorter ones")
    tokens = np.concatenate(documents).astype(token_dtype(vocab_size)).tobytes()
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tobytes()
    write_atomically(folder / f"{name}.idx", starts)
    write_atomically(folder / f"{name}.bin", tokens)
    return Shard(name, split, int(lengths.sum()), len(documents), hashlib.sha256(tokens).hexdigest())


class ShardSet:
    """The shards of one split of one prepared source, as a row of windows."""

    def __init__(self, folder: Path, manifest: Manifest, split: str):
        self.folder, self.manifest, self.split = folder, manifest, split
        self.shards = tuple(s for s in manifest.shards if s.split == split)
        self.tokens = sum(s.tokens for s in self.shards)
        self._mapped: dict[str, np.ndarray] = {}

    @staticmethod
    def open(folder: Path | str, split: str) -> "ShardSet":
        """Reads the manifest and looks at the sizes of the files, not into them.

        Raises ShardError if the manifest, or a shard it names, is missing or has another size than it says.
        """
        folder = Path(folder)
        shards = ShardSet(folder, Manifest.read(folder), split)
        for shard in shards.shards:
            shards._check_sizes(shard)
        return shards

    def _check_sizes(self, shard: Shard) -> None:
        itemsize = self.manifest.dtype.itemsize
        for suffix, right in ((".bin", shard.tokens * itemsize), (".idx", (shard.documents + 1) * 8)):
            path = self.folder / (shard.name + suffix)
            if not path.is_file():
                raise ShardError(f"shard {path} is missing though the manifest names it; prepare the source again")
            if path.stat().st_size != right:
                raise ShardError(
                    f"shard {path} has {path.stat().st_size} bytes, its manifest says {right}; prepare the source again"
                )

    def shard_tokens(self, shard: Shard) -> np.ndarray:
        """All tokens of a shard, memory-mapped."""
        return self._map(f"{shard.name}.bin", self.manifest.dtype)

    def document_starts(self, shard: Shard) -> np.ndarray:
        """int64 (documents + 1,), memory-mapped."""
        return self._map(f"{shard.name}.idx", np.dtype("<i8"))

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        """A mapping holds no file descriptor, so those of thousands of shards may stay open."""
        if name not in self._mapped:
            self._mapped[name] = np.asarray(np.memmap(self.folder / name, dtype=dtype, mode="r"))
        return self._mapped[name]

    def windows(self, seq_len: int) -> "Windows":
        return Windows(self, seq_len)

    def documents(self) -> Iterator[np.ndarray]:
        """Every document's tokens, the end id included, in order."""
        for shard in self.shards:
            tokens, starts = self.shard_tokens(shard), self.document_starts(shard)
            for begin, end in pairwise(starts):
                yield tokens[begin:end]

    def verify(self) -> list[str]:
        """Reads every byte: what is wrong with hashes, token ids and document boundaries, a sentence each."""
        return [problem for shard in self.shards for problem in self._verify_shard(shard)]

    def _verify_shard(self, shard: Shard) -> Iterator[str]:
        tokens, starts = self.shard_tokens(shard), self.document_starts(shard)
        path = self.folder / shard.name
        if hashlib.sha256(tokens).hexdigest() != shard.sha256:
            yield f"shard {path}.bin differs from the hash in its manifest; prepare the source again"
            return
        if tokens.max() >= self.manifest.vocab_size:
            yield f"shard {path}.bin holds id {tokens.max()}, outside the vocabulary of {self.manifest.vocab_size}"
        if starts[0] != 0 or starts[-1] != len(tokens) or np.diff(starts).min() < MIN_DOCUMENT:
            yield f"shard {path}.idx does not divide its tokens into documents; prepare the source again"
        elif (tokens[starts[1:] - 1] != self.manifest.end_id).any():
            yield f"shard {path}.bin has a document that does not end with the end id {self.manifest.end_id}"


class Windows:
    """The windows of a split at one sequence length: `len()` of them, each reached in O(log shards)."""

    def __init__(self, shards: ShardSet, seq_len: int):
        self.shards, self.seq_len = shards, seq_len
        counts = [max(0, s.tokens - 1) // seq_len for s in shards.shards]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (int64, seq_len + 1) of a window, and where in it documents start (int64, without 0)."""
        number = int(np.searchsorted(self._first, window, side="right")) - 1
        shard = self.shards.shards[number]
        begin = (window - int(self._first[number])) * self.seq_len
        end = begin + self.seq_len + 1
        tokens = self.shards.shard_tokens(shard)[begin:end].astype(np.int64)
        starts = self.shards.document_starts(shard)
        low, high = np.searchsorted(starts, [begin + 1, end])
        return tokens, starts[low:high] - begin
