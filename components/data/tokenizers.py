"""Tokenizers: text to ids and back, and how many bytes each id stands for.

Kind "tokenizer". All are byte-level BPE, so every byte string has an encoding and comes back exactly. Special ids
never come from text: "<|endoftext|>" in a document is ordinary characters. They are placed by code only
(the end of a document, the marks of a chat template), through `special_id`.

Needs neither torch nor a network. Left out on purpose: vocabularies that are not byte-level, since bits per byte and
the exact round trip would no longer hold.
"""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken

from registry import register

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLED = "assets/tokenizers"

# cl100k's rule for cutting text into words before merging (tiktoken `cl100k_base`); also the rule of training.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
# Qwen's: the same, but every digit is a word (`Qwen/Qwen3-0.6B`, tokenizer.json).
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END, BEGIN, PADDING = "<|endoftext|>", "<|begin|>", "<|pad|>"
CHAT_START, CHAT_END, THINK, THINK_END = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
SPECIALS = (END, BEGIN, PADDING, CHAT_START, CHAT_END, THINK, THINK_END)

# Qwen3's special tokens in order of id, from 151,643 (`tokenizer_config.json`, added_tokens_decoder).
# fmt: off
QWEN_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)
# fmt: on


class Tokenizer(ABC):
    """What every tokenizer offers. Ids are below `vocab_size`, which counts padding of the vocabulary too."""

    vocab_size: int
    end_id: int  # closes every document
    begin_id: int  # a mark for the beginning; stored documents do not carry it, they follow the last one's end id
    pad_id: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`; never a special id."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """`encode` of every text, on `threads` threads."""

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """`encode` as uint32 (tokens,); without a Python integer for each where the library can."""
        return np.array(self.encode(text), dtype=np.uint32)

    @abstractmethod
    def special_id(self, name: str) -> int:
        """The id of a special token such as "<|im_start|>"; ValueError if this vocabulary has none."""

    @abstractmethod
    def _bytes_of(self) -> list[bytes]:
        """The bytes of every id below `vocab_size`; b"" for special and unused ids."""

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return self._bytes_of()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for; special ids stand for none. Raises ValueError for an id out of range."""
        try:
            return b"".join([self.token_bytes[i] for i in ids])
        except IndexError:
            raise ValueError(f"an id is outside this vocabulary of {self.vocab_size}") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def byte_lengths(self) -> np.ndarray:
        """int32 (vocab_size,): bytes of each id, 0 for specials, so that losses of different tokenizers compare."""
        return np.array([len(b) for b in self.token_bytes], dtype=np.int32)

    @property
    @abstractmethod
    def hash(self) -> str:
        """sha256 (hex) of everything that decides an encoding: word pattern, ranks, special tokens."""


@dataclass(frozen=True)
class Layout:
    """Where ranks and special tokens stand among the ids: rank r is id `first_rank` + r."""

    ranks: dict[bytes, int]
    first_rank: int
    specials: dict[str, int]
    vocab_size: int
    pattern: str


class RankTokenizer(Tokenizer):
    """A tokenizer from a tiktoken rank file. What differs between them is only the layout of ids."""

    def __init__(self, config):
        self.layout = layout = self._layout(config)
        self._encoding = tiktoken.Encoding(
            type(self).__name__,
            pat_str=layout.pattern,
            mergeable_ranks={b: layout.first_rank + r for b, r in layout.ranks.items()},
            special_tokens=layout.specials,
        )
        self.vocab_size = layout.vocab_size
        self.end_id = layout.specials[END]
        self.begin_id = layout.specials.get(BEGIN, self.end_id)
        self.pad_id = layout.specials.get(PADDING, self.end_id)

    @classmethod
    @abstractmethod
    def _layout(cls, config) -> Layout:
        """The ids, from the files that `config` names."""

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        if threads == 1:
            return [self._encoding.encode_ordinary(t) for t in texts]
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def special_id(self, name: str) -> int:
        return _special(self.layout.specials, name)

    def _bytes_of(self) -> list[bytes]:
        found = [b""] * self.vocab_size
        for token, rank in self.layout.ranks.items():
            found[self.layout.first_rank + rank] = token
        return found

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256(self.layout.pattern.encode())
        for token in sorted(self.layout.ranks, key=self.layout.ranks.get):
            digest.update(b"%d:%s" % (len(token), token))
        digest.update(json.dumps([self.layout.first_rank, self.layout.vocab_size, self.layout.specials]).encode())
        return digest.hexdigest()


def _special(specials: dict[str, int], name: str) -> int:
    if name not in specials:
        raise ValueError(f'this tokenizer has no special token "{name}"; it has {", ".join(list(specials)[:12])}')
    return specials[name]


def located(path: str) -> Path:
    """A path of a recipe: as it stands, or else relative to the repository, so that bundled files are found from
    any working directory."""
    return Path(path) if Path(path).exists() else REPOSITORY / path


def read_ranks(path: str, remedy: str = "train one with `python -m recipes.train_tokenizer`") -> dict[bytes, int]:
    """Ranks of a tiktoken file: a base64 token and its rank a line.

    Raises ValueError if the file is missing, malformed, has a gap in its ranks or lacks one of the 256 bytes.
    """
    file = located(path)
    if not file.is_file():
        raise ValueError(f"tokenizer file {path} does not exist; {remedy}")
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        raise ValueError(f"{path} is not a tiktoken file: each line holds a base64 token and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path} must hold each rank from 0 to {len(ranks) - 1} once; the file is damaged")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} of the 256 single bytes (first: {missing[0]}); retrain it")
    return ranks


class FixedVocabulary:
    """A config whose `vocab_size` is its default: a recipe may state it, not change it."""

    vocab_size: int

    def __post_init__(self):
        if self.vocab_size != (right := type(self).vocab_size):
            raise ValueError(f"vocab_size must be {right}, not {self.vocab_size}; change it here and in [model]")


class HymoTokenizer(RankTokenizer):
    """Special ids first (0 end, 1 begin, 2 padding, chat and think marks, spares), then the words."""

    SPECIAL_IDS: int

    @classmethod
    def _layout(cls, config) -> Layout:
        ranks = read_ranks(config.path)
        if len(ranks) != config.vocab_size - cls.SPECIAL_IDS:
            raise ValueError(
                f"{config.path} holds {len(ranks)} words but this vocabulary needs "
                f"{config.vocab_size - cls.SPECIAL_IDS} beside {cls.SPECIAL_IDS} special ids ({config.vocab_size} in "
                "all); use the tokenizer that was trained for it"
            )
        spares = [f"<|reserved_{i}|>" for i in range(len(SPECIALS), cls.SPECIAL_IDS)]
        specials = {name: i for i, name in enumerate([*SPECIALS, *spares])}
        return Layout(ranks, cls.SPECIAL_IDS, specials, config.vocab_size, PATTERN)


@register("tokenizer", "hymo_bpe_64k")
class HymoBpe64k(HymoTokenizer):
    """The primary's vocabulary of 64,256: ids 0-255 special, then 64,000 words that include every byte."""

    SPECIAL_IDS = 256

    @dataclass(frozen=True, kw_only=True)
    class Config(FixedVocabulary):
        path: str = f"{BUNDLED}/hymo_64k.tiktoken"  # rank file with 64,000 words; the bundled one by default
        vocab_size: int = 64_256  # words and special ids; must equal the model's


@register("tokenizer", "hymo_bpe_4k")
class HymoBpe4k(HymoTokenizer):
    """A small vocabulary of 4,096 for runs on a laptop: ids 0-15 special, in the order of the large one."""

    SPECIAL_IDS = 16

    @dataclass(frozen=True, kw_only=True)
    class Config(FixedVocabulary):
        path: str = f"{BUNDLED}/hymo_4k.tiktoken"  # rank file with 4,080 words; the bundled one by default
        vocab_size: int = 4_096  # words and special ids; must equal the model's


@register("tokenizer", "qwen", example={"path": "data/qwen.tiktoken"})
class Qwen(RankTokenizer):
    """The Qwen vocabulary: 151,643 words, then Qwen3's special tokens, padded to 151,936."""

    WORDS = 151_643

    @dataclass(frozen=True, kw_only=True)
    class Config(FixedVocabulary):
        path: str  # Qwen's rank file, usually named qwen.tiktoken
        vocab_size: int = 151_936  # padded size; must equal the model's

    @classmethod
    def _layout(cls, config: Config) -> Layout:
        ranks = read_ranks(config.path, "docs/data.md says which package carries it")
        if len(ranks) != Qwen.WORDS:
            raise ValueError(f"{config.path} holds {len(ranks)} words but Qwen's vocabulary has {Qwen.WORDS}")
        specials = {name: Qwen.WORDS + i for i, name in enumerate(QWEN_SPECIALS)}
        return Layout(ranks, 0, specials, config.vocab_size, QWEN_PATTERN)


@register("tokenizer", "tiktoken", example={"path": "assets/tokenizers/hymo_4k.tiktoken", "vocab_size": 4_096})
class Tiktoken(RankTokenizer):
    """Any tiktoken rank file: its ranks are the ids, and the special tokens follow them."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str  # rank file
        vocab_size: int  # padded size, at least the ranks and the special tokens; must equal the model's
        pattern: str = PATTERN  # rule that cuts text into words; the file does not carry it
        specials: tuple[str, ...] = SPECIALS  # special tokens in order of id, the first after the last rank

        def __post_init__(self):
            if END not in self.specials:
                raise ValueError(f'specials must hold "{END}", which closes every document')

    @classmethod
    def _layout(cls, config: Config) -> Layout:
        ranks = read_ranks(config.path)
        _fits(config.path, config.vocab_size, len(ranks) + len(config.specials))
        specials = {name: len(ranks) + i for i, name in enumerate(config.specials)}
        return Layout(ranks, 0, specials, config.vocab_size, config.pattern)


@register("tokenizer", "tokenizer_json")
class TokenizerJson(Tokenizer):
    """A byte-level BPE vocabulary in Hugging Face's tokenizer.json (needs the extra `data`)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str  # tokenizer.json
        vocab_size: int  # padded size, at least the vocabulary; must equal the model's
        end: str = END  # the added token that closes every document
        begin: str | None = None  # the added token that opens text; `end` where there is none
        padding: str | None = None  # the added token that pads; `end` where there is none

    def __init__(self, config: Config):
        self._tokenizer = _load_tokenizer_json(config.path)
        self._specials = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        _fits(config.path, config.vocab_size, 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values()))
        self.vocab_size = config.vocab_size
        self.end_id = self.special_id(config.end)
        self.begin_id = self.special_id(config.begin or config.end)
        self.pad_id = self.special_id(config.padding or config.end)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """The library chooses its threads itself (environment variable RAYON_NUM_THREADS); `threads` is not used."""
        self._tokenizer.encode_special_tokens = True  # an added token's name in text is text
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def special_id(self, name: str) -> int:
        return _special(self._specials, name)

    def _bytes_of(self) -> list[bytes]:
        found = [b""] * self.vocab_size
        byte_of = _byte_alphabet()
        for token, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if token not in self._specials:
                found[i] = bytes(byte_of[c] for c in token)
        return found

    @cached_property
    def hash(self) -> str:
        content = json.dumps([json.loads(self._tokenizer.to_str()), self.vocab_size], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def _fits(path: str, vocab_size: int, needed: int) -> None:
    if vocab_size < needed:
        raise ValueError(f"{path} needs {needed} ids but vocab_size is {vocab_size}; raise it here and in [model]")


def _load_tokenizer_json(path: str):
    try:
        from tokenizers import Tokenizer as HubTokenizer
    except ImportError:
        raise ValueError("tokenizer_json needs the package tokenizers; `pip install -e .[data]`") from None
    file = located(path)
    if not file.is_file():
        raise ValueError(f"tokenizer file {path} does not exist")
    try:
        tokenizer = HubTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    if '"type":"ByteLevel"' not in tokenizer.to_str():
        raise ValueError(f"{path} is not byte-level BPE; bytes of its tokens would be unknown, so it is not supported")
    return tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE files (GPT-2 `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
