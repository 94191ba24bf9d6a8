"""A run killed while it saves (crash.py) leaves a checkpoint that the next run goes on from."""

from tests.ranks import run


def test_killed_at_any_instant_of_a_save(tmp_path):
    assert int(run("tests.checkpoint.crash", "each_instant", str(tmp_path / "checkpoint"))) > 30


def test_killed_at_any_moment_on_two_ranks_in_the_background(tmp_path):
    assert int(run("tests.checkpoint.crash", "any_moment", str(tmp_path / "checkpoint"))) > 3
