"""What a preparation must not forget when it is killed: how far each source is, and which texts were seen.

One SQLite database beside the prepared sources. A commit says, in one transaction, the position in the source, the
lengths of the open shard files, the counts, and the hashes of the documents taken since the last one. Files are
flushed to disk before it and cut back to what it says after a kill.

The hashes (64 bits of blake2b, an integer key each, about 20 bytes on disk) are how exact duplicates are found, at
any number of documents in the few megabytes of SQLite's page cache. Two different texts among 60 million share a hash
with probability 1e-4.
"""

import fcntl
import json
import sqlite3
from pathlib import Path
from typing import Any

from components.data.sources import SourceError

NAME = "preparation.sqlite"
LOCK = "preparation.lock"
CACHE_MEGABYTES = 64


class Journal:
    """The database of one output folder. Use as a context manager."""

    def __init__(self, folder: Path):
        """Raises SourceError while another process prepares into the same folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system when the process dies
        except BlockingIOError:
            raise SourceError(f"another process is preparing into {folder}; wait for it or end it") from None
        self._db = sqlite3.connect(folder / NAME, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA cache_size = -{CACHE_MEGABYTES * 1000}")
        self._db.execute("CREATE TABLE IF NOT EXISTS seen (hash INTEGER PRIMARY KEY, source TEXT)")
        self._db.execute("CREATE TABLE IF NOT EXISTS progress (source TEXT PRIMARY KEY, state TEXT)")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
        self._lock.close()

    def state(self, source: str) -> dict[str, Any] | None:
        """What the last commit of an unfinished source said."""
        found = self._db.execute("SELECT state FROM progress WHERE source = ?", (source,)).fetchone()
        return None if found is None else json.loads(found[0])

    def forget(self, source: str) -> None:
        """Before a source is prepared from the start: nothing of it was seen."""
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM seen WHERE source = ?", (source,))
        self._db.execute("DELETE FROM progress WHERE source = ?", (source,))
        self._db.execute("COMMIT")

    def begin(self) -> None:
        self._db.execute("BEGIN")

    def is_new(self, digest: bytes, source: str) -> bool:
        """Whether no document with this digest was seen; it is from now on, if the transaction is committed."""
        key = int.from_bytes(digest[:8], "little", signed=True)
        return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, source)).rowcount == 1

    def commit(self, source: str, state: dict[str, Any]) -> None:
        self._db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?)", (source, json.dumps(state)))
        self._db.execute("COMMIT")
