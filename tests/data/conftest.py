"""Small prepared sources and the bundled tokenizer, shared by the tests of the data path."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import registry
from components.data.config import DataConfig, SourceConfig
from components.data.shards import Manifest, write_shard


@pytest.fixture(scope="session")
def tokenizer():
    return registry.parse_component("tokenizer", {"name": "hymo_bpe_4k"}).build()


def make_source(folder: Path, tokenizer, *, documents: int, seed: int, shards: int = 3, name: str = "made") -> Path:
    """Random documents of 16 to 200 tokens in `shards` shards of training text and one of validation."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    made = []
    for split, number in [("train", i) for i in range(shards)] + [("validation", 0)]:
        lengths = draw.integers(15, 200, size=documents)
        texts = [np.append(draw.integers(16, tokenizer.vocab_size, size=n), tokenizer.end_id) for n in lengths]
        made.append(write_shard(folder, f"{split}-{number:05d}", split, texts, tokenizer.vocab_size))
    splits = {"train": 0.9, "validation": 0.1}
    Manifest.of(name, tokenizer, splits, tuple(made), {}, {}).write(folder)
    return folder


@pytest.fixture(scope="session")
def made_source(tokenizer):
    """`make_source` with the small tokenizer."""
    return partial(make_source, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def data_config(tmp_path_factory, tokenizer):
    """Two sources, weights 0.7 and 0.3, in `document` packing."""
    folder = tmp_path_factory.mktemp("sources")
    made = {
        n: make_source(folder / n, tokenizer, documents=60, seed=i, name=n) for i, n in enumerate(("prose", "code"))
    }
    weights = {"prose": 0.7, "code": 0.3}
    sources = {name: SourceConfig(path=str(path), weight=weights[name]) for name, path in made.items()}
    return DataConfig(sources=sources, packing="document", seed=7, workers=0)
