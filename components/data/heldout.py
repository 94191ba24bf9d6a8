"""Held-out text: the same few batches of each source at every validation, and what their losses are set against.

The windows are a fixed pseudo-random choice among the held-out ones, independent of the data seed, of ranks and of
workers, so that runs over seeds and ablations are scored on the same text.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from components.data.batch import Batch
from components.data.config import DataConfig, open_source
from components.data.mixture import key, permute
from components.data.packing import pack, valid_targets
from components.data.tokenizers import Tokenizer

SURPLUS = -1  # index of a row that only keeps ranks in step: it must not be counted


class HeldOut:
    """`batches` fixed micro-batches of each source in `sources` (all of [data.sources] where empty)."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        local_batch_size: int,
        number: int,
        sources: Sequence[str] = (),
        split: str = "validation",
    ):
        """`number` micro-batches of `local_batch_size` windows from each source's `split`.

        Raises ValueError if a source holds fewer windows than that; `check_data` finds it beforehand.
        """
        self.sources = tuple(sources) or tuple(config.sources)
        self.number, self._rows, self._packing = number, local_batch_size, config.packing
        self.byte_lengths = tokenizer.byte_lengths()  # int32 (vocab,): bytes each target stands for
        self._windows = {n: open_source(config.sources[n], tokenizer, split).windows(seq_len) for n in self.sources}
        for name, windows in self._windows.items():
            if len(windows) < number * local_batch_size:
                raise ValueError(
                    f"source {name} has {len(windows)} {split} sequences of {seq_len}, fewer than {number} batches of "
                    f"{local_batch_size}; lower [validation] batches"
                )

    def batches(self, source: str, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's micro-batches of a source: number j belongs to rank j mod world.

        Every rank gets as many, since collectives need it: where they do not divide, the last are repeats whose rows
        have index SURPLUS (-1) and must not be counted.
        """
        for first in range(0, self.number, world_size):
            yield self._batch(source, first + rank)

    def unigram_entropy(self, source: str | None = None) -> float:
        """Entropy in nats per token of the trained targets' own frequencies (of all sources where None): the loss of
        a model that knows how common each token is and nothing else."""
        counts: Counter[int] = Counter()
        for name in self.sources if source is None else (source,):
            for batch in self.batches(name):
                counts.update(batch.tokens_BT1[:, 1:][valid_targets(batch)].tolist())
        total = sum(counts.values())
        return -sum(n / total * math.log(n / total) for n in counts.values())

    def _batch(self, source: str, j: int) -> Batch:
        surplus = j >= self.number
        place = np.arange(self._rows) + min(j, self.number - 1) * self._rows
        size = np.full(self._rows, len(self._windows[source]))
        chosen = permute(place, size, np.full(self._rows, key("held out"), dtype=np.uint64))
        rows = [self._windows[source].read(int(w)) for w in chosen]
        return pack(rows, np.full(self._rows, SURPLUS) if surplus else place, self._packing)


def held_out_at(config: DataConfig, tokenizer: Tokenizer, validation: Any, training: Any) -> dict[int, HeldOut]:
    """Held-out text by sequence length, for each of [validation] lengths: about as many tokens a batch and in all as at
    [training] seq_len. Raises ValueError where a source has not as much."""
    tokens, found = training.local_batch_size * training.seq_len, {}
    for length in validation.lengths:
        rows = max(1, tokens // length)
        number = math.ceil(validation.batches * tokens / (rows * length))
        how = {"number": number, "sources": validation.sources}
        found[length] = HeldOut(config, tokenizer, seq_len=length, local_batch_size=rows, **how)
    return found
