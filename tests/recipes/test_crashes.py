"""Runs that are killed at random moments and started again are the unbroken run. The kills are in `crash`."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.ranks import run
from tests.recipes.runs import assert_same_lines, assert_same_state, lines

SEED = "5"  # the first kill waits for four lines, so that there is a checkpoint to go on from


def assert_continued(folder: Path, kills: int, numbers: list[int], rtol: float, timeout: float = 180) -> None:
    """The curve, the final state and what TensorBoard shows are the unbroken run's."""
    printed = run("tests.recipes.crash", str(folder), SEED, str(kills), *map(str, numbers), timeout=timeout)
    assert printed.count("SIGKILL") == kills * len(numbers) and "resumed after step" in printed
    unbroken, killed = folder / "unbroken", folder / "killed"
    assert_same_lines(lines(killed), lines(unbroken), rtol)
    assert_same_state(torch.load(killed / "state.pt"), torch.load(unbroken / "state.pt"), rtol)
    shown = EventAccumulator(str(killed / "tb")).Reload().Scalars("loss_metrics/global_avg_loss")
    assert [event.step for event in shown] == list(range(1, 21))


def test_killed_and_started_again_on_the_same_ranks_it_is_the_same_run_bit_for_bit(tmp_path):
    assert_continued(tmp_path, kills=2, numbers=[2], rtol=0.0)


def test_killed_and_started_again_on_other_numbers_of_ranks_it_is_the_same_run_to_rounding(tmp_path):
    assert_continued(tmp_path, kills=1, numbers=[1, 4], rtol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_killed_ten_times(tmp_path, ranks):
    assert_continued(tmp_path, kills=10, numbers=[ranks], rtol=0.0, timeout=1200)


@pytest.mark.heavy
def test_killed_ten_times_on_each_number_of_ranks(tmp_path):
    assert_continued(tmp_path, kills=10, numbers=[4, 1, 2], rtol=1e-5, timeout=1200)
