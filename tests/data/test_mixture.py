"""The mixture: exact shares, permutations, and the same cost and answer anywhere."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.mixture import BLOCK, Mixture, permute, quotas

HYMO = {
    "fineweb_edu": 0.50, "fineweb": 0.14, "python": 0.10, "java": 0.03, "cpp": 0.02, "slimpajama": 0.08, "dclm": 0.05,
    "wikipedia": 0.04, "books": 0.03, "cosmopedia": 0.01,
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_reaches_every_window_once(size, key):
    found = permute(np.arange(size), np.full(size, size), np.full(size, key, dtype=np.uint64))
    assert sorted(found.tolist()) == list(range(size))


def test_every_block_holds_each_sources_exact_quota():
    mixture = Mixture(HYMO, dict.fromkeys(HYMO, 12_345), seed=3)
    for block in (0, 1, 99_999):
        counts = np.bincount(mixture.locate(block * BLOCK + np.arange(BLOCK)).source, minlength=len(HYMO))
        assert dict(zip(HYMO, (counts / BLOCK).tolist(), strict=True)) == pytest.approx(HYMO, abs=1e-12)


def test_shares_over_a_million_sequences_are_within_a_thousandth_even_for_weights_that_do_not_divide():
    weights = {"a": 1 / 3, "b": 1 / 7, "c": 0.0123456, "d": 0.5}
    total = sum(weights.values())
    taken = Mixture(weights, dict.fromkeys(weights, 1000), seed=0).taken(1_000_000)
    assert sum(taken.values()) == 1_000_000
    for name, weight in weights.items():
        assert taken[name] / 1e6 == pytest.approx(weight / total, abs=1e-3)


def test_a_short_run_sees_the_mixture_too():
    sources = Mixture(HYMO, dict.fromkeys(HYMO, 1000), seed=0).locate(np.arange(400)).source
    shares = np.bincount(sources, minlength=len(HYMO)) / 400
    assert np.abs(shares - np.array(list(HYMO.values()))).max() < 0.01


def test_no_window_repeats_within_an_epoch_and_each_epoch_has_another_order():
    windows = {"a": 777, "b": 5000}
    mixture = Mixture({"a": 0.3, "b": 0.7}, windows, seed=1)
    found = mixture.locate(np.arange(4 * BLOCK))
    for number, size in enumerate(windows.values()):
        of_source = found.source == number
        for epoch in range(3):  # complete passes only
            seen = found.window[of_source & (found.epoch == epoch)]
            if len(seen) >= size:
                assert sorted(seen.tolist()) == list(range(size))
    a = found.source == 0
    first, second = (found.window[a & (found.epoch == e)] for e in (0, 1))
    assert (first != second).mean() > 0.9


def test_a_later_epoch_is_not_the_first_one_begun_elsewhere():
    window = Mixture({"a": 1.0}, {"a": BLOCK}, seed=1).locate(np.arange(2 * BLOCK)).window.tolist()
    follows = [set(pairwise(epoch)) for epoch in (window[:BLOCK], window[BLOCK:])]
    assert len(follows[0] & follows[1]) < 10


def test_every_block_deals_its_sources_in_another_order():
    first, second = Mixture(HYMO, dict.fromkeys(HYMO, 1000), seed=0).locate(np.arange(2 * BLOCK)).source.reshape(2, -1)
    assert (first != second).mean() > 0.3


def test_what_does_not_divide_goes_to_the_largest_remainder():
    assert quotas({"a": 0.5, "b": 0.31, "c": 0.19}, block=10) == {"a": 5, "b": 3, "c": 2}


def test_counts_taken_agree_with_counting():
    mixture = Mixture(HYMO, dict.fromkeys(HYMO, 1000), seed=5)
    for index in (0, 1, 4_321, BLOCK, 2 * BLOCK + 17):
        counted = np.bincount(mixture.locate(np.arange(index)).source, minlength=len(HYMO))
        assert list(mixture.taken(index).values()) == counted.tolist()


def test_another_seed_gives_another_order_and_the_same_seed_the_same():
    one, two, other = (Mixture(HYMO, dict.fromkeys(HYMO, 9999), seed=s).locate(np.arange(500)) for s in (1, 1, 2))
    assert (one.window == two.window).all() and (one.source == two.source).all()
    assert (one.window != other.window).mean() > 0.9


def test_sequence_a_billion_is_as_quick_as_the_first():
    mixture = Mixture(HYMO, dict.fromkeys(HYMO, 10_000_000), seed=0)

    def seconds(start):
        times = []
        for turn in range(20):
            begin = time.perf_counter()
            mixture.locate(start + turn * 64 + np.arange(64))
            times.append(time.perf_counter() - begin)
        return min(times)

    seconds(0)
    assert seconds(10**9) < 3 * seconds(0) + 1e-4


def test_a_weight_that_a_block_cannot_hold_is_refused():
    for weights in ({"a": 1.0, "b": 1e-6}, {"a": 1.0, "b": 0.0}):
        with pytest.raises(ValueError, match=r"weight .* of source b must be at least"):
            quotas(weights)
