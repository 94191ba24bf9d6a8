"""The [data] section of a recipe, opening the sources it names, and finding what is wrong with them beforehand.

Needs no torch, so that a recipe can be checked before anything large is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from components.data import bundled
from components.data.mixture import quotas
from components.data.shards import Manifest, ShardError, ShardSet
from components.data.tokenizers import Tokenizer, located
from registry import Problem, unknown

Packing = Literal["window", "document"]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of the mixture."""

    path: str  # a folder made by recipes.prepare_data, or a small .jsonl.gz file that is tokenized on first use
    weight: float = 1.0  # share of the sequences, relative to the other sources

    def __post_init__(self):
        if not self.weight > 0:
            raise ValueError(f"weight must be above 0, not {self.weight}; remove the source to leave it out")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the training text comes from and how it becomes batches."""

    sources: dict[str, SourceConfig]  # the mixture, by name
    packing: Packing = "window"  # "window": documents run on; "document": nothing crosses a document's end
    seed: int = 0  # order of the sequences
    workers: int = 1  # threads that prepare batches ahead of the step; 0 prepares each when it is asked for

    def __post_init__(self):
        if not self.sources:
            raise ValueError("at least one source is needed; add a table [data.sources.NAME] with a path")
        if self.workers < 0:
            raise ValueError(f"workers must not be negative, it is {self.workers}")
        quotas({name: source.weight for name, source in self.sources.items()})


def open_source(source: SourceConfig, tokenizer: Tokenizer, split: str) -> ShardSet:
    """The shards of a source; a small text file is tokenized first.

    Raises ShardError if there is nothing at the path, a shard is missing or damaged in size, or another tokenizer
    made the shards.
    """
    path = located(source.path)
    if path.is_file() and path.name.endswith(bundled.SUFFIX):
        path = bundled.prepared(path, tokenizer)
    elif not path.exists():
        raise ShardError(
            f"{source.path} does not exist; make it with `python -m recipes.prepare_data TABLE.toml` (tables of the "
            "recipes' sources are in train_configs/data/)"
        )
    shards = ShardSet.open(path, split)
    shards.manifest.check_tokenizer(path, tokenizer)
    return shards


def check_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    validation_sources: Sequence[str] = (),
    validation_sequences: int = 0,
) -> list[Problem]:
    """Everything that would stop a run for lack of text, found before a process group or a GPU is touched.

    `validation_sources` must each hold `validation_sequences` held-out windows. Tokenizes small text files that have
    not been yet. Returns an empty list when all is well.
    """
    problems = []
    for name, source in config.sources.items():
        place = ("data", "sources", name)
        problems += _check_split(source, tokenizer, "train", seq_len, 1, place)
    for name in validation_sources:
        if name not in config.sources:
            problems.append(
                Problem(("validation", "sources"), unknown("source in [data.sources]", name, config.sources))
            )
        elif not any(p.path[-1] == name for p in problems):
            place = ("validation", "sources", name)
            problems += _check_split(
                config.sources[name], tokenizer, "validation", seq_len, validation_sequences, place
            )
    return problems


def _check_split(
    source: SourceConfig, tokenizer: Tokenizer, split: str, seq_len: int, needed: int, place: tuple[str, ...]
) -> list[Problem]:
    try:
        shards = open_source(source, tokenizer, split)
    except ShardError as error:
        return [Problem(place, str(error))]
    found = len(shards.windows(seq_len))
    if found >= needed:
        return []
    return [
        Problem(
            place,
            f"the {split} split of {source.path} has {shards.tokens:,} tokens, that is {found} sequences of {seq_len}, "
            f"and {needed} are needed; lower [training] seq_len{_remedy(split)} or prepare more text",
        )
    ]


def _remedy(split: str) -> str:
    return " or [validation] batches" if split == "validation" else ""


def describe(manifest: Manifest) -> str:
    """One line of a manifest for start banners: tokens by split and documents."""
    parts = [f"{manifest.tokens(split):,} {split}" for split in manifest.splits]
    return f"{manifest.source}: {', '.join(parts)} tokens, {sum(s.documents for s in manifest.shards):,} documents"
