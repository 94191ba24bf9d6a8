"""Batches of training text for one rank, from any step, for any number of ranks, without state.

A step trains the sequences [step * G, (step + 1) * G) of the mixture, G the global batch. They are cut into
micro-batches of b sequences; micro-batch j is sequences [step * G + j * b, … + b) and belongs to rank j mod world.
So what a step trains on depends on neither the number of ranks nor the workers, and the loader's whole state is the
number of the step.

Batches ahead of the step are made by threads (`torchdata.nodes`): the work is copying out of the page cache, which
releases the interpreter, so processes would only add copies.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
import torchdata.nodes as nodes

from components.data.batch import Batch
from components.data.config import DataConfig, open_source
from components.data.mixture import Located, Mixture
from components.data.packing import pack
from components.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)

LOCATED_AT_ONCE = 1024  # sequences whose places are computed together: one vectorised call instead of many
FOREVER = 1 << 60


class TrainData:
    """The training sequences of a run, as rank `rank` of `world_size` sees them."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        global_batch_size: int,
        local_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool = False,
    ):
        """`global_batch_size` and `local_batch_size` count sequences: of a step, and of a micro-batch.

        Raises ValueError if micro-batches do not divide evenly over ranks, ShardError for sources that cannot be
        read; `check_data` finds the latter beforehand.
        """
        check_batch_sizes(global_batch_size, local_batch_size, world_size)
        self.config, self.rank, self.world_size, self.pin_memory = config, rank, world_size, pin_memory
        self.global_batch_size, self.local_batch_size = global_batch_size, local_batch_size
        self.micro_batches_per_step = global_batch_size // (local_batch_size * world_size)
        self.shards = {name: open_source(source, tokenizer, "train") for name, source in config.sources.items()}
        self._windows = {name: shards.windows(seq_len) for name, shards in self.shards.items()}
        self.mixture = Mixture(
            {name: source.weight for name, source in config.sources.items()},
            {name: len(windows) for name, windows in self._windows.items()},
            config.seed,
        )
        self._located = lru_cache(maxsize=8)(self._locate_many)
        self._stream: Iterator[Batch] | None = None
        self._next_step = -1
        self._repeated: set[str] = set()

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of a step (steps count from 0), in order. Asking for steps in order is fast;
        any other step is as right."""
        self._warn_of_repeats(step)
        if self.config.workers == 0:
            first = step * self.micro_batches_per_step
            return (self._pinned(self.batch(first + i)) for i in range(self.micro_batches_per_step))
        if step != self._next_step or self._stream is None:
            self._stream = self._ahead(step * self.micro_batches_per_step)
        self._next_step = step + 1
        return iter(list(islice(self._stream, self.micro_batches_per_step)))

    def batch(self, ordinal: int) -> Batch:
        """The `ordinal`-th micro-batch of this rank since step 0: a pure function."""
        step, turn = divmod(ordinal, self.micro_batches_per_step)
        first = step * self.global_batch_size + (turn * self.world_size + self.rank) * self.local_batch_size
        index = np.arange(first, first + self.local_batch_size)
        return pack([self.window(int(i)) for i in index], index, self.config.packing)

    def where(self, index: int) -> tuple[str, int, int]:
        """Source, window in it, and pass through it (from 0) of sequence `index` of the run."""
        chunk, inside = divmod(index, LOCATED_AT_ONCE)
        located = self._located(chunk)
        return self.mixture.names[located.source[inside]], int(located.window[inside]), int(located.epoch[inside])

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and document starts of sequence `index` of the run."""
        name, window, _ = self.where(index)
        return self._windows[name].read(window)

    def epochs(self, step: int) -> dict[str, float]:
        """How often each source has been gone through before `step`."""
        return self.mixture.epochs(step * self.global_batch_size)

    def _locate_many(self, chunk: int) -> Located:
        return self.mixture.locate(np.arange(chunk * LOCATED_AT_ONCE, (chunk + 1) * LOCATED_AT_ONCE))

    def _ahead(self, ordinal: int) -> Iterator[Batch]:
        """Micro-batches from `ordinal` on, prepared by threads, in order."""
        numbers = nodes.IterableWrapper(range(ordinal, FOREVER))
        batches = nodes.ParallelMapper(numbers, self.batch, num_workers=self.config.workers, method="thread")
        return iter(nodes.Loader(nodes.PinMemory(batches) if self.pin_memory else batches))

    def _pinned(self, batch: Batch) -> Batch:
        return batch.pin_memory() if self.pin_memory else batch

    def _warn_of_repeats(self, step: int) -> None:
        sequences = (step + 1) * self.global_batch_size
        if self.rank != 0 or sequences <= self.mixture.single_pass or len(self._repeated) == len(self.shards):
            return
        for name, epochs in self.mixture.epochs(sequences).items():
            if epochs > 1 and name not in self._repeated:
                self._repeated.add(name)
                log.warning("source %s repeats: step %d begins pass %d through its text", name, step, int(epochs) + 1)


def check_batch_sizes(global_batch_size: int, local_batch_size: int, world_size: int) -> None:
    """Raises ValueError unless every rank gets the same number of whole micro-batches."""
    if global_batch_size % (local_batch_size * world_size):
        raise ValueError(
            f"[training] global_batch_size {global_batch_size} must be a multiple of local_batch_size "
            f"{local_batch_size} times {world_size} ranks, so that every rank gets as many micro-batches"
        )
