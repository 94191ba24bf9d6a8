"""Who orthogonalises what, and how even that is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.optimizers.distribution import PLANS, cost, load_report
from components.optimizers.exchange import Region, homeward, outward

SHAPES = [(4, 4), (8, 2), (16, 16), (4, 4), (1, 64), (16, 16), (2, 2)]
side = st.integers(1, 64)


@given(st.lists(st.tuples(side, side), max_size=30), st.integers(1, 9))
def test_every_matrix_has_an_owner_and_under_naive_all_ranks(shapes, ranks):
    for name, plan in PLANS.items():
        owners = plan(shapes, ranks)
        assert len(owners) == len(shapes)
        assert all(o == tuple(range(ranks)) if name == "naive" else 0 <= o[0] < ranks for o in owners)


def test_round_robin_deals_by_falling_size_and_unsorted_by_definition():
    owners = [o[0] for o in PLANS["round_robin"](SHAPES, 3)]
    assert owners == [0, 1, 0, 2, 2, 1, 0]
    assert [o[0] for o in PLANS["unsorted"](SHAPES, 3)] == [0, 1, 2, 0, 1, 2, 0]


@given(st.lists(st.tuples(side, side), min_size=1, max_size=30), st.integers(1, 9))
def test_balanced_never_exceeds_the_mean_by_more_than_the_largest_matrix(shapes, ranks):
    report = load_report("balanced", shapes, ranks)
    assert max(report.costs) <= sum(report.costs) / ranks + max(map(cost, shapes))


def test_the_load_report_says_how_many_times_the_mean_the_slowest_rank_takes():
    shapes = [(10, 10), (10, 10), (10, 10)]
    assert load_report("round_robin", shapes, 2).max_over_mean == pytest.approx(2 / 1.5)
    assert load_report("naive", shapes, 2).max_over_mean == 1.0
    assert load_report("round_robin", [], 2).max_over_mean == 1.0


def test_replicated_parts_travel_once_and_come_back_to_every_replica():
    top, bottom = Region((0, 0), (2, 3)), Region((2, 0), (1, 3))
    holdings = [top, bottom, top, bottom, None]
    arriving = outward(7, holdings, owners=(3,))
    assert sorted((t.source, t.target) for t in arriving) == [(0, 3), (3, 3)]
    returning = homeward(7, holdings, owners=(3,))
    assert sorted((t.source, t.target) for t in returning) == [(3, 0), (3, 1), (3, 2), (3, 3)]


def test_under_naive_nothing_comes_home_from_another_rank():
    holdings = [Region((i, 0), (1, 3)) for i in range(3)]
    assert all(t.source == t.target for t in homeward(0, holdings, owners=(0, 1, 2)))
    assert len(outward(0, holdings, owners=(0, 1, 2))) == 9
