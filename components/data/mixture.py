"""Which window of which source is sequence i of a run: a pure function of (seed, i), with no state to save.

    block    = i // BLOCK                            blocks hold each source's exact quota
    place    = (i * KNUTH + offset(seed, block)) mod BLOCK       a permutation of the block's places
    source   = the one whose share of [0, BLOCK) holds place
    n        = block * quota[source] + (place - first place of the source)      how-manieth of its source
    epoch, m = divmod(n, windows of the source)
    window   = permutation(seed, source, epoch)(m)   so no window repeats within an epoch

All of it is integer arithmetic on arrays, so the billionth sequence costs what the first does and any rank can
compute any of them. The multiplicative hash with Knuth's 2,654,435,761 (TAOCP 3, 6.4) is a prime, so it permutes
every block; it also spreads a source's places evenly, so shares are close to the weights within a block too.

Left out on purpose: sampling with replacement, and weights that change during a run (a second stage is a second run).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

BLOCK = 10_000
KNUTH = 2_654_435_761
ROUNDS = 4


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: uint64 -> uint64, every output bit depends on every input bit (Steele et al. 2014)."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*parts: object) -> int:
    """A 64-bit key from anything printable; stable across machines and versions."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def permute(m: np.ndarray, size: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Pseudo-random permutation of [0, size), evaluated at `m`; each element has its own `size` (both int64) and key
    (uint64).

    A balanced Feistel network on the next even number of bits; values that land outside are sent through again
    ("cycle walking", Black and Rogaway 2002), fewer than four times on average.
    """
    half = (np.frexp(np.maximum(size - 1, 1))[1].astype(np.uint64) + np.uint64(1)) // np.uint64(2)
    x = m.astype(np.uint64)
    outside = np.ones(len(x), dtype=bool)
    while outside.any():
        x[outside] = _feistel(x[outside], half[outside], keys[outside])
        outside &= x >= size.astype(np.uint64)
    return x.astype(np.int64)


def _feistel(x: np.ndarray, bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    low = (np.uint64(1) << bits) - np.uint64(1)
    left, right = x >> bits, x & low
    for turn in range(ROUNDS):
        left, right = right, left ^ (mix(right ^ mix(keys + np.uint64(turn))) & low)
    return (left << bits) | right


def quotas(weights: Mapping[str, float], block: int = BLOCK) -> dict[str, int]:
    """Sequences of each source in a block, by largest remainder: exact to 1 / block of the whole.

    Raises ValueError for a weight that is not positive, or so small that a block holds none of it.
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        if not weight > 0 or weight / total * block < 0.5:
            raise ValueError(f"weight {weight} of source {name} must be at least {0.5 / block:g} of the sum {total:g}")
    exact = {name: weight / total * block for name, weight in weights.items()}
    found = {name: int(e) for name, e in exact.items()}
    by_remainder = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in by_remainder[: block - sum(found.values())]:
        found[name] += 1
    return found


@dataclass(frozen=True)
class Located:
    """Where sequences come from, an array entry each: number of the source, window in it, pass through it."""

    source: np.ndarray
    window: np.ndarray
    epoch: np.ndarray


class Mixture:
    """Sequences 0, 1, 2, … of a run. `weights` need not sum to 1; `windows` counts each source's windows."""

    def __init__(self, weights: Mapping[str, float], windows: Mapping[str, int], seed: int):
        self.names = tuple(weights)
        self.seed = seed
        found = quotas(weights)
        self.quota = np.array([found[n] for n in self.names], dtype=np.int64)
        self.windows = np.array([windows[n] for n in self.names], dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(self.quota)])
        self._source_keys = np.array([key("window", seed, n) for n in self.names], dtype=np.uint64)
        self._offset_key = np.uint64(key("block", seed))

    def locate(self, index: np.ndarray) -> Located:
        """Source, window and epoch of each sequence of `index` (int64)."""
        index = np.asarray(index, dtype=np.int64)
        source, n = self._source_and_count(index)
        epoch, m = np.divmod(n, self.windows[source])
        keys = mix(self._source_keys[source] + mix(epoch.astype(np.uint64) + np.uint64(1)))
        return Located(source, permute(m, self.windows[source], keys), epoch)

    def taken(self, index: int) -> dict[str, int]:
        """How many of the sequences before `index` came from each source."""
        block, rest = divmod(index, BLOCK)
        sources, _ = self._source_and_count(block * BLOCK + np.arange(rest, dtype=np.int64))
        counts = block * self.quota + np.bincount(sources, minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    @cached_property
    def single_pass(self) -> int:
        """Sequences, in whole blocks, that surely take no window twice."""
        return int((self.windows // self.quota).min()) * BLOCK

    def epochs(self, index: int) -> dict[str, float]:
        """How often each source has been gone through after `index` sequences."""
        return {n: c / int(w) for (n, c), w in zip(self.taken(index).items(), self.windows, strict=True)}

    def _source_and_count(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        block, inside = np.divmod(index, BLOCK)
        offset = (mix(self._offset_key + block.astype(np.uint64)) % np.uint64(BLOCK)).astype(np.int64)
        place = (inside * (KNUTH % BLOCK) + offset) % BLOCK
        source = np.searchsorted(self._first, place, side="right") - 1
        return source, block * self.quota[source] + place - self._first[source]
