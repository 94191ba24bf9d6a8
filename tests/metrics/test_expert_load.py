"""How evenly experts are loaded, in numbers."""

import math

import pytest

from components.metrics.expert_load import load_statistics


@pytest.mark.parametrize(
    ("counts", "entropy", "max_violation", "dead"),
    [
        ([5, 5, 5, 5], 1.0, 0.0, 0),
        ([6, 2, 0, 0], (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4), 2.0, 2),
        ([0, 9, 0], 0.0, 2.0, 2),
        ([7], 1.0, 0.0, 0),
    ],
)
def test_entropy_is_1_and_maxvio_0_where_the_load_is_even_over_all_experts_and_the_idle_ones_are_counted(
    counts, entropy, max_violation, dead
):
    expected = {"entropy": entropy, "max_violation": max_violation, "dead": dead}
    assert load_statistics(counts) == pytest.approx(expected, abs=1e-12)
