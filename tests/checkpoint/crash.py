"""Runs that are killed while they save, and what the next run finds. A program of its own: it forks, and the children
have process groups.

    python -m tests.checkpoint.crash each_operation FOLDER    one rank, killed before its 1st, 2nd, 3rd ... file access
    python -m tests.checkpoint.crash any_moment FOLDER        two ranks saving in the background, killed by the clock
Prints what it found; exits with 1 where the next run could not go on.
"""

import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from components.checkpoint.checkpointer import Checkpointer
from components.checkpoint.dcp import Views
from components.parallel import process_group
from components.parameters import LogicalView
from tests.ranks import free_port

ROWS = 4
FILE_OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir")


def each_operation(folder: Path) -> int:
    """Kill the save of step 2 before every file operation in turn, until it has fewer. Returns how many it has."""
    assert ended(forked([partial(save_next, folder / "0")])) == 0
    operation, status = 0, 1
    while status != 0:
        operation += 1
        root = shutil.copytree(folder / "0", folder / str(operation))
        status = ended(forked([partial(save_next, root, killed_at=operation)]))
        found = reported(root, ranks=1)
        assert found in (1, 2), f"killed at operation {operation}: step {found} after step 1"
    assert found == 2
    return operation - 1


def any_moment(folder: Path, kills: int = 8) -> int:
    """Kill both ranks at once at a random moment, `kills` times. Returns the newest step."""
    newest, moments = 0, random.Random(0)
    for _ in range(kills):
        children = forked([partial(save_on, folder)] * 2)
        time.sleep(0.3 + 0.5 * moments.random())
        for child in children:
            os.kill(child, signal.SIGKILL)
        ended(children)
        found = reported(folder, ranks=2)
        assert found >= newest, f"step {found} after step {newest}"
        newest = found
    return newest


# What the children do ---------------------------------------------------------------------------------


def save_next(folder: Path, killed_at: int = 0) -> None:
    """Go on from the newest checkpoint for one step; its save is killed before file operation `killed_at`."""
    checkpointer = Checkpointer(folder, keep_latest_k=1)
    step = restored(checkpointer) + 1
    die_before(folder, killed_at)
    checkpointer.save(step, views(step), {"step": step})


def save_on(folder: Path) -> None:
    checkpointer = Checkpointer(folder, keep_latest_k=1, async_mode="async")
    for step in range(restored(checkpointer) + 1, 10_000):
        checkpointer.save(step, views(step), {"step": step})


def go_on(folder: Path) -> None:
    """Write down which step a new run goes on from, and prove that its next save leaves no remains of the killed."""
    checkpointer = Checkpointer(folder, keep_latest_k=1)
    step = restored(checkpointer)
    folder.with_suffix(".found").write_text(str(step))
    checkpointer.save(step + 1, views(step + 1), {"step": step + 1})
    assert os.listdir(folder) == [f"step-{step + 1}"], os.listdir(folder)


def restored(checkpointer: Checkpointer) -> int:
    """The step of the newest checkpoint, after proving that its content is that step's."""
    step = checkpointer.latest()
    if step is None:
        return 0
    tensors = views(0)
    assert checkpointer.load(step, tensors) == {"step": step}
    assert all(view.local.eq(step).all() for view in tensors.values())
    return step


def views(step: int) -> Views:
    """A tensor sharded by rows and a replicated one, full of `step`."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    rows = ROWS // ranks
    part = LogicalView("w", (ROWS, 3), (rank * rows, 0), torch.full((rows, 3), float(step)))
    return {"w": part, "b": LogicalView("b", (2,), (0,), torch.full((2,), float(step)))}


def die_before(folder: Path, operation: int) -> None:
    """Set a trap: SIGKILL before the nth file operation under `folder`; 0 sets none."""
    left = operation

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in FILE_OPERATIONS and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


# Parent and children ----------------------------------------------------------------------------------


def forked(works: list) -> list[int]:
    """Each of `works` in a child that is a rank of a group of them all."""
    port = free_port()
    children = []
    for rank, work in enumerate(works):
        child = os.fork()
        if child == 0:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(works), "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
            process_group.init(30, "cpu")
            try:
                work()
            except BaseException as error:
                print(f"rank {rank}: {error!r}", flush=True)
                process_group.shutdown(1)
            process_group.shutdown(0)
        children.append(child)
    return children


def ended(children: list[int]) -> int:
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def reported(folder: Path, ranks: int) -> int:
    """The step that a new run would go on from."""
    assert ended(forked([partial(go_on, folder)] * ranks)) == 0, "the next run could not go on"
    return int(folder.with_suffix(".found").read_text())


if __name__ == "__main__":
    print({"each_operation": each_operation, "any_moment": any_moment}[sys.argv[1]](Path(sys.argv[2])))
