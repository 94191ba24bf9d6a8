"""From rows to token ids: which field is the text, which documents are refused and why, and their encoding.

Everything here is a pure function of a row, so it runs in worker processes. What needs memory of other documents
(duplicates) or of what came before (shards) is in `preparation.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from components.data.chat import encode_chat, text_of
from components.data.shards import MIN_DOCUMENT, token_dtype
from components.data.sources import Broken, Row
from components.data.splits import digest
from components.data.tokenizers import Tokenizer

UNIQUE_SAMPLE = 500  # characters: the number of different ones does not grow with length, so their share is of a sample
_NO_SYMBOLS = bytes(b for b in range(256) if b > 127 or chr(b).isalpha())


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which field of a row is the document, and which documents are refused."""

    text: str = "text"  # field with the text
    messages: str = ""  # field with a conversation, rendered by the chat template; instead of `text`
    score: str = ""  # field with a number that says how good the document is
    min_score: float = 0.0  # documents below are refused
    min_unique: float = 0.05  # least share of different characters, among the first 500
    max_symbols: float = 0.5  # greatest share of digits, punctuation and whitespace (ASCII)

    def __post_init__(self):
        if self.min_score and not self.score:
            raise ValueError("min_score needs score, the name of the field that holds it")


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk that were kept: ids end to end (each document closed by the end id), lengths, digests;
    how many rows were refused, by reason; and where the first of each kind of broken row was."""

    tokens: np.ndarray
    lengths: np.ndarray
    digests: list[bytes]
    refused: Counter[str]
    places: dict[str, str] = field(default_factory=dict)


Content = str | list[dict[str, Any]]  # text, or the messages of a conversation


class Refused(Exception):
    """Why a document is not taken, in few words, for counting; of a row that is broken, "broken: …"."""


def encode_rows(rows: Sequence[Row | Broken], selection: Selection, tokenizer: Tokenizer) -> Encoded:
    """Select, filter, hash and tokenize the rows of a chunk, in order."""
    refused, places = Counter(), {}
    pieces, lengths, digests = [], [], []
    end = np.array([tokenizer.end_id], dtype=np.uint32)
    for row in rows:
        try:
            content, text = _accepted(row, selection)
            ids = _encode(content, tokenizer)
            if len(ids) + 1 < MIN_DOCUMENT:
                raise Refused("short")
        except Refused as reason:
            refused[str(reason)] += 1
            places.setdefault(str(reason), _place(row))
            continue
        pieces += [ids, end]
        lengths.append(len(ids) + 1)
        digests.append(digest(text))
    tokens = np.concatenate([*pieces, end[:0]]).astype(token_dtype(tokenizer.vocab_size))
    return Encoded(tokens, np.array(lengths, dtype=np.int64), digests, refused, places)


def text_of_row(row: Row | Broken, selection: Selection) -> str:
    """The text of a row, as filters and hashes see it. Raises Refused with the reason where it is not taken."""
    return _accepted(row, selection)[1].decode("utf-8", errors="replace")


def _encode(content: Content, tokenizer: Tokenizer) -> np.ndarray:
    if isinstance(content, str):
        return tokenizer.encode_to_numpy(content)
    return np.array(encode_chat(tokenizer, content), dtype=np.uint32)


def _accepted(row: Row | Broken, selection: Selection) -> tuple[Content, bytes]:
    """The content of a row and its text in UTF-8, if the filters let it through."""
    content = _content(row, selection)
    text = content if isinstance(content, str) else text_of(content)
    if not text or text.isspace():
        raise Refused("empty")
    sample = text[:UNIQUE_SAMPLE]
    if len(set(sample)) < selection.min_unique * len(sample):
        raise Refused("few characters")
    packed = text.encode("utf-8", errors="surrogatepass")
    if len(packed.translate(None, _NO_SYMBOLS)) > selection.max_symbols * len(text):
        raise Refused("symbols")
    return content, packed


def _content(row: Row | Broken, selection: Selection) -> Content:
    """The text or the messages of a row, if its score is high enough."""
    if isinstance(row, Broken):
        raise Refused(f"broken: {row.reason}")
    if selection.score:
        _check_score(row, selection)
    if not selection.messages:
        return _typed(row, selection.text, str, "text")
    messages = _typed(row, selection.messages, list, "a list of messages")
    try:
        text_of(messages)
    except ValueError as error:
        raise Refused(f"broken: {error}") from None
    return messages


def _check_score(row: Row, selection: Selection) -> None:
    score = row.get(selection.score)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise Refused(f"broken: field {selection.score} holds {_kind(row, selection.score)}, not a number")
    if score < selection.min_score:
        raise Refused("score")


def _typed(row: Row, name: str, right: type, words: str) -> Any:
    value = row.get(name)
    if not isinstance(value, right):
        raise Refused(f"broken: field {name} holds {_kind(row, name)}, not {words}")
    return value


def _kind(row: Row, name: str) -> str:
    return type(row[name]).__name__ if name in row else "nothing"


def _place(row: Row | Broken) -> str:
    if isinstance(row, Broken):
        return row.place
    return (
        ", ".join(f"{k} {v!r:.40}" for k, v in row.items() if k in ("id", "path", "url")) or f"fields {', '.join(row)}"
    )
