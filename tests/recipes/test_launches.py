"""The command itself: how it ends when asked to stop, when it cannot go on, and fifty times in a row."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.banner import with_steps
from tests.ranks import ENVIRONMENT, REPOSITORY
from tests.recipes.runs import arguments, lines

FAST = ("--validation.no_enable", "--metrics.no_enable_tensorboard")


@pytest.mark.parametrize("before", [[], ["--training.steps", "100"], ["--training.steps=100"]])
def test_the_command_that_trains_longer_names_the_number_of_steps_once(before):
    arguments = ["--job.config_file", "a.toml", *before, "--training.seq_len", "64"]
    expected = ["--job.config_file", "a.toml", "--training.seq_len", "64", "--training.steps", "200"]
    assert with_steps(arguments, 200) == expected


def launch(folder: Path, *flags: str, ranks: int | None = None) -> subprocess.Popen:
    """`python -m recipes.pretrain`, or through torchrun on a number of ranks."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks else []
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "recipes.pretrain", *arguments(folder, *FAST, *flags)],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stopped(folder: Path, process: subprocess.Popen, hears: int, number: signal.Signals) -> str:
    """What a launch prints whose process `hears` gets a signal as soon as it has trained two more steps."""
    before = steps_logged(folder)
    while process.poll() is None and steps_logged(folder) < before + 2:
        time.sleep(0.02)
    os.kill(hears, number)
    return process.communicate(timeout=60)[0]


def steps_logged(folder: Path) -> int:
    log = folder / "metrics.jsonl"
    return log.read_text().count("\n") if log.is_file() else 0


def children(process: subprocess.Popen) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def last_checkpoint(folder: Path) -> int:
    return max(int(marker.parent.name.removeprefix("step-")) for marker in folder.glob("checkpoint/step-*/COMPLETE"))


def wait_for_ranks(process: subprocess.Popen, ranks: int) -> list[int]:
    while process.poll() is None and len(children(process)) < ranks:
        time.sleep(0.05)
    return children(process)


def test_a_signal_to_one_rank_stops_all_after_a_save_with_status_0_and_one_to_torchrun_saves_too(tmp_path):
    process = launch(tmp_path, ranks=2)
    printed = stopped(tmp_path, process, wait_for_ranks(process, 2)[1], signal.SIGTERM)
    assert process.returncode == 0, printed
    step = int(re.search(r"stopped after step (\d+) of 20", printed)[1])
    assert last_checkpoint(tmp_path) == step < 20
    assert "resume: torchrun --nproc_per_node=2 -m recipes.pretrain --job.config_file" in printed

    process = launch(tmp_path, ranks=2)
    printed = stopped(tmp_path, process, process.pid, signal.SIGINT)
    assert f"resumed after step {step}," in printed
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, last_checkpoint(tmp_path) + 1))
    assert step < last_checkpoint(tmp_path) < 20, "torchrun's own status is not 0 then, but nothing was lost"


def test_a_run_that_diverges_ends_with_one_sentence_and_status_1(tmp_path):
    process = launch(tmp_path, "--optimizer.scalar.lr=1e30", "--training.max_skipped_steps=2")
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert printed.splitlines()[-1].startswith("stopped: 2 steps in a row up to step ") and "Traceback" not in printed


@pytest.mark.heavy
def test_fifty_launches_in_a_row_on_four_ranks_end_with_status_0(tmp_path):
    for number in range(50):
        process = launch(tmp_path / str(number), "--training.steps=2", ranks=4)
        printed = process.communicate(timeout=120)[0]
        assert process.returncode == 0, f"launch {number}: {printed}"
