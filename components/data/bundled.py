"""Small text files as sources: tokenized into shards on first use, so that a clean checkout needs no manual step.

A source whose path is a file `….jsonl.gz` (the corpus in `assets/` above all) is prepared into a cache folder whose
name holds a hash of the text and of the tokenizer: another tokenizer gets another folder, and nothing is ever stale.
The first process to come holds a lock while it works, in seconds; other ranks of the host wait for it.

The cache is `data/cache` in the repository, or the folder in HYMO_DATA_CACHE.
Left out on purpose: large files. Filters, de-duplication and resuming belong to `recipes.prepare_data`.
"""

import fcntl
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from components.data.shards import FORMAT, MIN_DOCUMENT, SPLITS, Manifest, ShardError, write_shard
from components.data.splits import DIGEST_BYTES, digest, split_of
from components.data.tokenizers import REPOSITORY, Tokenizer

SUFFIX = ".jsonl.gz"
LARGEST = 64_000_000  # bytes, compressed: seconds of work, not minutes
FRACTIONS = {"train": 0.9, "validation": 0.05, "test": 0.05}  # a small text needs a larger held-out share


def cache_folder() -> Path:
    return Path(os.environ.get("HYMO_DATA_CACHE", REPOSITORY / "data" / "cache"))


def prepared(file: Path, tokenizer: Tokenizer) -> Path:
    """The folder of shards of `file`, made now if it is not there. Raises ShardError for a file that is not such
    text."""
    if file.stat().st_size > LARGEST:
        raise ShardError(
            f"{file} is too large to tokenize on first use; prepare it with `python -m recipes.prepare_data`"
        )
    name = file.name.removesuffix(SUFFIX)
    content = hashlib.sha256(
        f"{FORMAT} {MIN_DOCUMENT} {DIGEST_BYTES} {FRACTIONS} {tokenizer.hash} {_digest(file)}".encode()
    )
    folder = cache_folder() / f"{name}-{content.hexdigest()[:16]}"
    if not (folder / "manifest.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "manifest.json").is_file():
                _prepare(file, folder, tokenizer, name)
    return folder


@cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _prepare(file: Path, folder: Path, tokenizer: Tokenizer, name: str) -> None:
    texts = list(_texts(file))
    documents: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if len(ids) + 1 >= MIN_DOCUMENT:
            documents[split_of(digest(text.encode()), FRACTIONS)].append(np.array([*ids, tokenizer.end_id]))
    shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed had left
    folder.mkdir()
    shards = tuple(
        write_shard(folder, f"{split}-00000", split, found, tokenizer.vocab_size)
        for split, found in documents.items()
        if found
    )
    kept = sum(s.documents for s in shards)
    counts = {"read": len(texts), "kept": kept, "short": len(texts) - kept}
    origin = {"kind": "bundled", "file": file.name}
    Manifest.of(name, tokenizer, FRACTIONS, shards, counts, origin).write(folder)


def _texts(file: Path) -> Iterator[str]:
    number = 0
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        try:
            for line in lines:
                number += 1
                yield json.loads(line)["text"]
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ShardError(f"{file} is not whole gzip-compressed UTF-8 text ({error})") from None
        except (ValueError, KeyError, TypeError):
            raise ShardError(f'{file} line {number} is not a JSON object with a "text"') from None
