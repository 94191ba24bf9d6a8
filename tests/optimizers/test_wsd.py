"""The warm-up, stable, decay schedule."""

import pytest

from components.optimizers.roles import build_optimizers
from registry import RecipeError, parse_component
from tests.optimizers.small_model import configs, initialised


def wsd(**table):
    return parse_component("schedule", {"name": "wsd", "warmup_ratio": 0.02} | table).build()


def test_the_primary_run_warms_up_for_1144_steps_holds_for_47493_and_decays_for_8583():
    schedule, steps = wsd(decay_ratio=0.15, min_lr_factor=0.05), 57_220
    factors = [schedule.factor(step, steps) for step in range(steps)]
    assert schedule.phases(steps) == (1144, 47_493, 8583)
    assert factors[0] == 1 / 1144
    assert factors[1142] < 1 == factors[1143] == factors[1143 + 47_493] > factors[1144 + 47_493]
    assert factors[-1] == pytest.approx(0.05, abs=1e-15)


@pytest.mark.parametrize("shape, halfway", [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_each_decay_shape_falls_from_one_to_the_final_factor(shape, halfway):
    schedule = wsd(decay_ratio=0.5, decay_type=shape, min_lr_factor=0.1)
    factors = [schedule.factor(step, 200) for step in range(99, 200)]
    assert factors[0] == 1 and factors[-1] == pytest.approx(0.1)
    assert factors[50] == pytest.approx(0.1 + 0.9 * halfway)
    assert factors == sorted(factors, reverse=True)


def test_a_warm_up_in_steps_is_taken_as_it_stands_and_a_short_run_keeps_both_ends():
    schedule = wsd(warmup_ratio=None, warmup_steps=100, decay_ratio=0.1)
    assert schedule.phases(250_000) == (100, 224_900, 25_000)
    assert schedule.factor(9, 20) == 0.1 and schedule.factor(19, 20) == 0
    overlapping = wsd(warmup_ratio=None, warmup_steps=8, decay_ratio=0.5)
    assert overlapping.factor(5, 10) == 6 / 8 and overlapping.factor(8, 10) == pytest.approx(1 / 5)


def test_without_warm_up_or_decay_the_factor_is_one():
    assert {wsd(warmup_ratio=0, decay_ratio=0).factor(step, 5) for step in range(5)} == {1.0}
    assert parse_component("schedule", {"name": "constant"}).build().factor(3, 5) == 1.0


@pytest.mark.parametrize(
    "table, message",
    [
        ({"warmup_ratio": None}, "either warmup_ratio or warmup_steps"),
        ({"warmup_steps": 5}, "either warmup_ratio or warmup_steps"),
        ({"warmup_ratio": 0.6, "decay_ratio": 0.6}, "add up to more than 1"),
        ({"min_lr_factor": 2.0}, "min_lr_factor must lie in"),
    ],
)
def test_an_impossible_schedule_is_refused_in_one_sentence(table, message):
    with pytest.raises(RecipeError, match=message):
        wsd(**table)


def test_the_ratio_of_any_two_learning_rates_is_the_same_at_every_step():
    schedule, optimizer = wsd(decay_ratio=0.3), build_optimizers(initialised(), configs())
    for step in range(99):  # the last step's rates are 0
        rates = optimizer.learning_rates(schedule.factor(step, 100))
        assert rates["matrix"] / rates["expert"] == pytest.approx(20, rel=1e-12)
        assert rates["matrix"] / rates["scalar"] == pytest.approx(20, rel=1e-12)
