"""launch/slurm.sh between SLURM and the tasks, with stand-ins for SLURM's commands and for Python."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >>scontrol.log; fi',
    "scancel": 'echo "$@" >>scancel.log; kill -TERM "$(cat task.pid)"',
    "srun": 'shift; export SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4; echo $$ >task.pid; exec "$@"',
    "python": "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR \"$@\" >task.log; trap 'sleep 0.3; exit 0' TERM; "
    'for i in $(seq 50); do [ -e end ] && exit "$(cat end)"; sleep 0.1; done',
}


@pytest.fixture
def job(tmp_path):
    """A submitted job: SLURM's folder, where the stand-ins leave what they were told."""
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "setup.sh").write_text("export PYTHON=python\n")
    names = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment = os.environ | {name: str(value) for name, value in names.items()}
    environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = ["bash", str(REPOSITORY / "launch" / "slurm.sh"), "recipe.toml", "--training.steps", "3"]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        _until((tmp_path / "task.log").exists)
        time.sleep(0.2)
        yield process, tmp_path
        process.kill()


def test_each_task_knows_its_rank_and_the_first_node(job):
    process, folder = job
    (folder / "end").write_text("0")
    assert process.wait(timeout=10) == 0
    told = (folder / "task.log").read_text().split()
    assert told[:4] == ["3", "1", "4", "node1"]
    assert told[4:] == ["-m", "recipes.pretrain", "--job.config_file", "recipe.toml", "--training.steps", "3"]
    assert not (folder / "scontrol.log").exists()


def test_before_the_time_limit_the_tasks_save_and_the_job_is_requeued(job):
    process, folder = job
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=10) == 0
    assert (folder / "scancel.log").read_text() == "--signal=TERM 77\n"
    assert (folder / "scontrol.log").read_text() == "requeue 77\n"


def test_a_failure_is_the_jobs_status_and_is_not_requeued(job):
    process, folder = job
    (folder / "end").write_text("5")
    assert process.wait(timeout=10) == 5
    assert not (folder / "scontrol.log").exists()


def _until(condition) -> None:
    for _ in range(100):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the task was not started")
