"""Conversations as text of a model: ChatML in the manner of Qwen3.

    <|im_start|>user
    What is 2 + 2?<|im_end|>
    <|im_start|>assistant
    <think>

    </think>

    4<|im_end|>

A system message may stand anywhere. An answer without reasoning gets an empty think block; reasoning that comes with
the data stays, in every turn. The marks are special ids, placed here; the same characters in what a user or a system
message says are ordinary text, so no data can forge a turn.
Left out on purpose: tools, and masking of what the user says (pretraining trains on all of it).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from components.data.tokenizers import CHAT_END, CHAT_START, THINK, THINK_END, Tokenizer

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_MARKS = re.compile(f"({re.escape(THINK)}|{re.escape(THINK_END)})")

Segment = tuple[bool, str]  # is it a special token, and its name or the ordinary text


def segments(messages: Sequence[Mapping[str, Any]]) -> Iterator[Segment]:
    """A conversation, cut into special tokens and text. Messages are {role, content} or {from, value}.

    Raises ValueError for a message without text or with a role that is none of system, user and assistant.
    """
    for message in messages:
        role, content = _role_and_content(message)
        yield True, CHAT_START
        yield False, f"{role}\n"
        yield from _answer(content) if role == "assistant" else [(False, content)]
        yield True, CHAT_END
        yield False, "\n"


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of a conversation, without an end id."""
    ids: list[int] = []
    for special, text in segments(messages):
        ids += [tokenizer.special_id(text)] if special else tokenizer.encode(text)
    return ids


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as one string: what filters and hashes look at."""
    return "".join(text for _, text in segments(messages))


def _role_and_content(message: Mapping[str, Any]) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError("a message is not an object with role and content")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"a message has role {role!r} and {type(content).__name__} content")
    return ROLES[role], content


def _answer(content: str) -> Iterator[Segment]:
    """What an assistant says, with its think block, or an empty one before it."""
    if THINK not in content:
        content = f"{THINK}\n\n{THINK_END}\n\n{content}"
    for part in _MARKS.split(content):
        if part:
            yield part in (THINK, THINK_END), part
