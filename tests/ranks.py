"""Runs functions on several gloo ranks: one launch for many functions, one verdict a function.

    python -m tests.ranks RANKS MODULE FOLDER    every `test_*` of MODULE on each rank, with FOLDER if it takes one

Ranks are forks of one process that has imported everything, which takes longer than most tests. A process group in the
pytest process itself would abort it now and then at its end, so even a single rank is a process of its own.
"""

import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from components.parallel import process_group

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def sentences(module: str) -> list[str]:
    """The names of the functions that `verdicts` reports on, in order."""
    return [name for name in vars(importlib.import_module(module)) if name.startswith("test_")]


def on_ranks(module: str, *ranks: int) -> pytest.MarkDecorator:
    """Makes of a test that asserts `not raised` one of every `test_*` of `module` on each of these numbers of ranks.

    The launches are made in this order in one folder, when the first of the tests is due; a later one finds there what
    an earlier one left.
    """
    each = [((module, ranks, n, name), f"{name}-{n}") for name in sentences(module) for n in ranks]
    return pytest.mark.parametrize("raised", [pytest.param(what, id=title) for what, title in each], indirect=True)


def verdicts(ranks: int, module: str, folder: Path) -> dict[str, str]:
    """What each `test_*` of `module` raised on any of `ranks` ranks, "" for nothing; of all of them, what the launch
    failed with."""
    try:
        run("tests.ranks", str(ranks), module, str(folder))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return dict.fromkeys(sentences(module), str(error))
    return json.loads(_report(folder, module, ranks).read_text())


def run(module: str, *arguments: str, timeout: float = 180) -> str:
    """What `python -m module` prints; it must end with status 0, in `timeout` seconds."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rank_environment(ranks: int) -> list[dict[str, str]]:
    """What torchrun would set for each of `ranks` ranks."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def forked(works: list[Callable[[], None]]) -> list[int]:
    """Start each of `works` as one rank of a new group; their process ids. A rank that raises ends with 1."""
    children = []
    for work, environment in zip(works, rank_environment(len(works)), strict=True):
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            process_group.init(30, "cpu")
            try:
                work()
            except BaseException:
                traceback.print_exc()
                process_group.shutdown(1)
            process_group.shutdown(0)
        children.append(child)
    return children


def ended(children: list[int]) -> int:
    """Wait for them all: 0, or the largest status or signal."""
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def _report(folder: Path, module: str, ranks: int) -> Path:
    return folder / f"{module}.{ranks}.json"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _try_all(module: str, folder: Path) -> None:
    """On each rank: every function, then one joint report."""
    found = {name: _raised(getattr(importlib.import_module(module), name), folder) for name in sentences(module)}
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, found)
    if dist.get_rank() == 0:
        joint = {name: "\n".join(report[name] for report in reports if report[name]) for name in found}
        _report(folder, module, dist.get_world_size()).write_text(json.dumps(joint))


def _raised(function: Callable, folder: Path) -> str:
    try:
        function(*[folder] * len(inspect.signature(function).parameters))
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    importlib.import_module(sys.argv[2])
    sys.exit(ended(forked([partial(_try_all, sys.argv[2], Path(sys.argv[3]))] * int(sys.argv[1]))))
