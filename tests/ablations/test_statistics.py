"""Intervals and verdicts on made data with known answers."""

import math
import random

import pytest

from recipes.ablate.statistics import Interval, interval, judgement, paired, t_quantile, verdict


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (7, 2.36462), (30, 2.04227), (1000, 1.96234)]
)
def test_t_quantiles_are_those_of_the_tables(degrees, value):
    assert t_quantile(degrees) == pytest.approx(value, rel=5e-6)


def test_a_paired_interval_is_that_of_the_worked_example():
    """Differences 0.1, 0.2, 0.3: mean 0.2, standard deviation 0.1, t 4.30265 over the root of 3."""
    found = paired({0: 3.1, 1: 4.2, 2: 5.3}, {0: 3.0, 1: 4.0, 2: 5.0})
    assert found.mean == pytest.approx(0.2)
    assert found.half == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)


def test_pairs_are_of_equal_seed_and_a_seed_that_one_lacks_is_left_out():
    assert paired({0: 1.0, 2: 5.0}, {2: 4.0, 1: 9.0, 0: 0.5}) == interval([0.5, 1.0])
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_pairing_separates_what_the_spread_over_seeds_hides():
    base = {seed: 3.0 + 0.5 * seed for seed in range(3)}
    variant = {seed: loss - 0.01 - 0.0001 * seed for seed, loss in base.items()}
    assert interval(list(variant.values())).high > interval(list(base.values())).low
    assert verdict(paired(variant, base)) == "better"


@pytest.mark.parametrize(
    ("mean", "half", "says"),
    [(-0.3, 0.2, "better"), (0.3, 0.2, "worse"), (0.1, 0.2, "not separated"), (0.2, 0.2, "not separated")],
)
def test_a_verdict_needs_an_interval_without_zero(mean, half, says):
    assert verdict(Interval(mean, half)) == says


def test_of_one_seed_nothing_is_said():
    assert verdict(interval([-1.0])) == "one seed"
    assert judgement(interval([-1.0]), 0.0, None) == "not settled"


def test_a_bound_is_met_refuted_or_not_settled():
    assert judgement(Interval(0.03, 0.005), 0.02, None) == "met"
    assert judgement(Interval(0.01, 0.005), 0.02, None) == "refuted"
    assert judgement(Interval(0.021, 0.005), 0.02, None) == "not settled"
    assert judgement(Interval(-0.03, 0.005), None, 0.0) == "met"
    assert judgement(Interval(0.03, 0.005), None, 0.0) == "refuted"
    assert judgement(Interval(0.021, 0.005), None, 0.02) == "not settled"
    assert judgement(Interval(0.03, 0.005), None, None) is None


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_under_the_null_about_95_percent_of_comparisons_are_not_separated(seeds):
    """Losses of a seed share what its batches did; 4,000 comparisons have a standard error of 0.35%."""
    draw = random.Random(seeds)
    found = []
    for _ in range(4000):
        shared = [draw.gauss(3.0, 0.1) for _ in range(seeds)]
        variant, reference = ({s: x + draw.gauss(0, 0.01) for s, x in enumerate(shared)} for _ in range(2))
        found.append(verdict(paired(variant, reference)))
    share = found.count("not separated") / len(found)
    assert share == pytest.approx(0.95, abs=4 * 0.0035)
    assert found.count("better") == pytest.approx(found.count("worse"), rel=0.5)
