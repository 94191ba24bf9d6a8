"""Runs functions on several gloo ranks: one launch for many functions, one verdict a function.

A process group in the pytest process itself would abort it now and then at its end, so even one rank has its own.
    python -m tests.ranks MODULE FOLDER    what each rank runs: every `test_*` of MODULE, with FOLDER
"""

import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from components.parallel import process_group

REPOSITORY = Path(__file__).parents[1]


def sentences(module: str) -> list[str]:
    """The names of the functions that `verdicts` reports on, in order."""
    return [name for name in vars(importlib.import_module(module)) if name.startswith("test_")]


def verdicts(ranks: int, module: str, folder: Path) -> dict[str, str]:
    """What each `test_*` of `module` raised on any of `ranks` ranks, "" for nothing."""
    processes = start(ranks, [sys.executable, "-m", "tests.ranks", module, str(folder)])
    output = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(output)
    return json.loads((folder / f"{module}.{ranks}.json").read_text())


def start(ranks: int, command: list[str]) -> list[subprocess.Popen]:
    """`command` as each of `ranks` ranks, with the environment that torchrun would give it."""
    shared = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main(module: str, folder: str) -> None:
    place = process_group.init(init_timeout_seconds=30, device_type="cpu")
    found = {}
    for name in sentences(module):
        found[name] = _raised(getattr(importlib.import_module(module), name), Path(folder))
    reports: list = [None] * place.ranks
    dist.all_gather_object(reports, found)
    if place.rank == 0:
        joint = {name: "\n".join(report[name] for report in reports if report[name]) for name in found}
        (Path(folder) / f"{module}.{place.ranks}.json").write_text(json.dumps(joint))
    process_group.shutdown()


def _raised(function, folder: Path) -> str:
    try:
        function(*[folder] * len(inspect.signature(function).parameters))
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
