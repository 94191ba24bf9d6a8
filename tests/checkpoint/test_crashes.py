"""A run killed while it saves (crash.py) leaves a checkpoint that the next run goes on from."""

import subprocess
import sys

from tests.ranks import REPOSITORY


def run(case: str, folder) -> int:
    command = [sys.executable, "-m", "tests.checkpoint.crash", case, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[-1])


def test_killed_before_any_file_operation_of_a_save(tmp_path):
    assert run("each_operation", tmp_path / "checkpoint") > 15


def test_killed_at_any_moment_on_two_ranks_in_the_background(tmp_path):
    assert run("any_moment", tmp_path / "checkpoint") > 3
