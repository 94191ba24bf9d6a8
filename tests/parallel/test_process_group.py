"""The process group: a group of one, timeouts, the watch over steps."""

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch

from components.parallel.process_group import Place, StepWatch, init
from tests.ranks import ENVIRONMENT, REPOSITORY, rank_environment


def ends(ranks: int, program: str) -> tuple[list[int], str]:
    """The exit statuses of `program` on each of `ranks` ranks, and what they printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in rank_environment(ranks)
    ]
    output = [process.communicate(timeout=60)[0] for process in processes]
    return [process.returncode for process in processes], "".join(output)


def test_a_plain_python_process_is_a_group_of_one():
    program = (
        "import torch.distributed as dist; from components.parallel import process_group as p; "
        "place = p.init(device_type='cpu'); dist.barrier(); dist.new_group(backend='gloo'); p.set_timeout(5); "
        "print(place.rank, place.ranks, place.device); p.shutdown()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "cpu"]), done.stderr


def test_a_rank_that_never_comes_ends_a_collective_within_the_timeout():
    program = (
        "import time; import torch.distributed as dist; from components.parallel import process_group as p\n"
        "place = p.init(60, 'cpu'); p.set_timeout(2)\n"
        "if place.rank == 1: time.sleep(4); p.shutdown(3)\n"
        "try:\n"
        "    with p.StepWatch(place).step(7, 2): dist.barrier()\n"
        "except RuntimeError: p.shutdown(4)\n"
    )
    statuses, output = ends(2, program)
    assert statuses == [4, 3]
    assert "rank 0: step 7 has not ended in 2 s" in output


def place(rank: int, ranks: int) -> Place:
    return Place(rank, ranks, torch.device("cpu"))


def test_the_watch_is_silent_while_steps_end_in_time_however_long_validation_takes(capfd):
    with closing(StepWatch(place(0, 2))) as watch:
        for step in range(3):
            with watch.step(step, 0.4):
                time.sleep(0.1)
            time.sleep(0.6)
    assert capfd.readouterr().err == ""


def test_the_watch_speaks_once_a_step_that_does_not_end(capfd):
    with closing(StepWatch(place(3, 4))) as watch:
        for step in (12, 13):
            with watch.step(step, 0.2):
                time.sleep(0.8)
    said = capfd.readouterr().err
    assert [said.count(f"rank 3: step {step} has not ended") for step in (12, 13)] == [1, 1]


def test_the_watch_is_silent_on_a_single_rank_which_waits_for_nobody(capfd):
    with closing(StepWatch(place(0, 1))) as watch, watch.step(1, 0.2):
        time.sleep(0.5)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_rank_without_a_gpu_is_told_so():
    with pytest.raises(ValueError, match="local rank 0 has no GPU: 0 visible"):
        init(device_type="cuda")
