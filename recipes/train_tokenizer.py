"""Train a byte-level BPE vocabulary on a sample of a mixture: `python -m recipes.train_tokenizer TABLE --out FILE`.

The table is one of `recipes.prepare_data`; each source gives its weight of the sample, taken from its beginning, after
the same filters. The result is a tiktoken rank file for `hymo_bpe_64k` (64,000 words beside 256 special ids) or
`hymo_bpe_4k` (--words 4080). It is checked (every byte is a word, ranks without gap, random bytes come back) and
reported on: bytes per token of each source, on text that training did not see.

The table's own tokenizer is not used. Training holds the sample's words in memory: about 350 MB for 50 MB of text.
"""

import base64
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rustbpe
import tiktoken
import tyro
from rich.console import Console
from rich.table import Table

from components.data.documents import Refused, text_of_row
from components.data.preparation import Preparation, SourceTable
from components.data.shards import write_atomically
from components.data.sources import SourceError
from components.data.tokenizers import PATTERN
from recipes.prepare_data import read_plan

HELD_BACK = 10  # one document in so many is kept for the report

console = Console(highlight=False, markup=False, soft_wrap=True)

Sample = dict[str, list[str]]


@dataclass(frozen=True)
class Arguments:
    """Train a byte-level BPE vocabulary on a sample of a mixture."""

    table: tyro.conf.Positional[str]  # file with [output], [tokenizer] and [sources.NAME]; see train_configs/data/
    out: str  # tiktoken rank file to write
    words: int = 64_000  # size of the vocabulary without special ids, the 256 bytes included
    characters: int = 50_000_000  # of the sample, over all sources


def main(arguments: Arguments) -> int:
    plan = read_plan(arguments.table)
    training, held_back = {}, {}
    for name, source in plan.sources.items():
        texts = list(take(source, round(arguments.characters * plan.share(name))))
        held_back[name], training[name] = texts[::HELD_BACK], [t for i, t in enumerate(texts) if i % HELD_BACK]
        console.print(f"{name}: {sum(map(len, texts)):,} characters in {len(texts):,} documents")
    ranks = train([text for texts in training.values() for text in texts], arguments.words)
    check(ranks, arguments.words)
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(arguments.out), b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    console.print(report(ranks, held_back, plan))
    console.print(f"Written: {arguments.out}. Use it as `path` of [tokenizer] and prepare the shards with it.")
    return 0


def take(source: SourceTable, characters: int) -> Iterator[str]:
    """Texts of a source that its filters keep, until there are as many characters."""
    for chunk in source.read.build().chunks():
        for row in chunk.rows:
            try:
                text = text_of_row(row, source.select)
            except Refused:
                continue
            yield text
            characters -= len(text)
            if characters <= 0:
                return


def train(texts: list[str], words: int) -> dict[bytes, int]:
    """Ranks by token, in order of rank: first the bytes, then merges by frequency."""
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size=words, pattern=PATTERN)
    return dict(sorted(((bytes(token), rank) for token, rank in trainer.get_mergeable_ranks()), key=lambda p: p[1]))


def check(ranks: dict[bytes, int], words: int) -> None:
    """Raises ValueError if the text was too little for so many words, or something does not come back."""
    if len(ranks) != words:
        raise ValueError(f"the sample gives only {len(ranks)} words of {words}; raise --characters or lower --words")
    if {bytes([b]) for b in range(256)} - set(ranks):
        raise ValueError("the training library left out single bytes; the vocabulary would not be complete")
    encoding, draw = _encoding(ranks), random.Random(0)
    for _ in range(1000):
        content = draw.randbytes(draw.randrange(200)).decode("utf-8", errors="replace")
        if encoding.decode(encoding.encode_ordinary(content)) != content:
            raise ValueError(f"{content!r} does not come back from its tokens")


def report(ranks: dict[bytes, int], held_back: Sample, plan: Preparation) -> Table:
    """Bytes per token by source, and of the mixture."""
    encoding, total = _encoding(ranks), 0.0
    table = Table("source", "share", "bytes per token", title="on documents that were held back")
    for name, texts in held_back.items():
        tokens = sum(len(encoding.encode_ordinary(t)) for t in texts)
        rate = sum(len(t.encode()) for t in texts) / max(1, tokens)
        total += plan.share(name) / max(rate, 1e-9)
        table.add_row(name, f"{plan.share(name):.1%}", f"{rate:.3f}")
    table.add_row("mixture", "100.0%", f"{1 / total:.3f}")
    return table


def _encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("trained", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def command(arguments: list[str] | None = None) -> int:
    try:
        return main(tyro.cli(Arguments, prog="python -m recipes.train_tokenizer", args=arguments))
    except SourceError as error:
        console.print(f"Stopped: {error}")
        return 1
    except ValueError as error:
        console.print(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(command())
