import os
import subprocess
import sys
import time

import pytest
import torch

from components.parallel.process_group import StepWatch, init
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
        "place = p.init(60, 'cpu'); p.set_timeout(2); watch = p.StepWatch(2, place.rank); watch.step(7)\n"
        "if place.rank == 1: time.sleep(4); p.shutdown(3)\n"
        "try: dist.barrier()\n"
        "except RuntimeError: p.shutdown(4)\n"
    )
    statuses, output = ends(2, program)
    assert statuses == [4, 3]
    assert "rank 0: step 7 has not ended in 2 s" in output


def test_the_watch_is_silent_while_steps_end_in_time(capfd):
    watch = StepWatch(0.4, rank=0)
    for step in range(6):
        watch.step(step)
        time.sleep(0.1)
    watch.close()
    assert capfd.readouterr().err == ""


def test_the_watch_speaks_once_a_step(capfd):
    watch = StepWatch(0.2, rank=3)
    watch.step(12)
    time.sleep(0.8)
    watch.close()
    assert capfd.readouterr().err.count("rank 3: step 12 has not ended") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_rank_without_a_gpu_is_told_so():
    with pytest.raises(ValueError, match="local rank 0 has no GPU: 0 visible"):
        init(device_type="cuda")
