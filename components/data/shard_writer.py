"""Writing shards document by document, in files that can be cut back to any commit.

Open shards carry `.part` in their names. `state()` says how long the files of each split are; a new writer cuts them
back to that, undoes the finishing of a shard that came after it, and removes shards begun since. So shards are the
same, byte for byte, however often the writer was killed.
"""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from components.data.shards import Shard, ShardError, token_dtype


class ShardWriter:
    """Documents of one split, in order, into shards of at most `shard_tokens` tokens (one longer document has a shard
    of its own)."""

    def __init__(
        self, folder: Path, split: str, vocab_size: int, shard_tokens: int, state: dict[str, Any] | None = None
    ):
        """Goes on from what `state()` said, or from nothing. Raises ShardError if files have lost what they held."""
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.finished = [Shard(**s) for s in state["finished"]] if state else []
        self.tokens, self.documents = (state["tokens"], state["documents"]) if state else (0, 0)
        self._open()

    @property
    def total_tokens(self) -> int:
        return self.tokens + sum(s.tokens for s in self.finished)

    def add(self, document: np.ndarray) -> None:
        """`document` ends with the end id."""
        if self.tokens and self.tokens + len(document) > self.shard_tokens:
            self._seal()
            self._open()
        content = document.astype(self.dtype).tobytes()
        self._hash.update(content)
        self._bin.write(content)
        self._idx.write(_start(self.tokens))
        self.tokens += len(document)
        self.documents += 1

    def state(self) -> dict[str, Any]:
        """Everything written so far is on disk; what to give a new writer to go on from here."""
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())
        return {"finished": [asdict(s) for s in self.finished], "tokens": self.tokens, "documents": self.documents}

    def complete(self) -> list[Shard]:
        """Finish the last shard; every shard of this split."""
        if self.tokens:
            self._seal()
        else:
            self.close()
            self._part(".bin").unlink()
            self._part(".idx").unlink()
        return self.finished

    def close(self) -> None:
        """Let go of the files without finishing."""
        self._bin.close()
        self._idx.close()

    def _seal(self) -> None:
        self._idx.write(_start(self.tokens))
        self.state()
        self.close()
        for suffix in (".idx", ".bin"):
            os.replace(self._part(suffix), self._path(suffix))
        self.finished.append(Shard(self._name(), self.split, self.tokens, self.documents, self._hash.hexdigest()))
        self.tokens, self.documents = 0, 0

    def _open(self) -> None:
        """The files of the open shard, cut to the length they should have."""
        for suffix, size in ((".bin", self.tokens * self.dtype.itemsize), (".idx", self.documents * 8)):
            if size and self._path(suffix).exists():
                os.replace(self._path(suffix), self._part(suffix))
            with open(self._part(suffix), "ab") as file:
                if file.tell() < size:
                    raise ShardError(
                        f"{self._part(suffix)} lost bytes since it was written; delete {self.folder} to redo it"
                    )
                file.truncate(size)
        self._remove_later()
        self._bin, self._idx = (self._part(suffix).open("ab") for suffix in (".bin", ".idx"))
        self._hash = hashlib.sha256(self._part(".bin").read_bytes())

    def _remove_later(self) -> None:
        kept = {s.name for s in self.finished}
        for path in self.folder.glob(f"{self.split}-*"):
            if path.name.split(".")[0] not in kept and path not in (self._part(".bin"), self._part(".idx")):
                path.unlink()

    def _name(self) -> str:
        return f"{self.split}-{len(self.finished):05d}"

    def _path(self, suffix: str) -> Path:
        return self.folder / (self._name() + suffix)

    def _part(self, suffix: str) -> Path:
        return self.folder / (self._name() + suffix + ".part")


def _start(tokens: int) -> bytes:
    return np.int64(tokens).astype("<i8").tobytes()
