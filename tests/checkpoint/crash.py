"""Runs that are killed while they save, and what the next run finds.

    python -m tests.checkpoint.crash each_instant FOLDER    one rank, killed at its 1st, 2nd, 3rd ... step on the disk
    python -m tests.checkpoint.crash any_moment FOLDER      two ranks saving in the background, killed by the clock

Prints a number; fails where the next run cannot go on, or where what the killed one left stays for ever.
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

from components.checkpoint import folder as on_disk
from components.checkpoint.checkpointer import Checkpointer
from components.checkpoint.dcp import Views
from components.parameters import LogicalView
from tests.ranks import ended, forked

ROWS = 4


def each_instant(folder: Path) -> int:
    """Kill the save of step 2 at every instant in turn, until it has fewer. Returns how many it has."""
    assert ended(forked([partial(save_next, folder / "0")])) == 0
    instant, status = 0, 1
    while status != 0:
        instant += 1
        root = shutil.copytree(folder / "0", folder / str(instant))
        status = ended(forked([partial(save_next, root, killed_at=instant)]))
        found = next_run(root, ranks=1)
        assert found in (1, 2), f"killed at instant {instant}: step {found} after step 1"
    assert found == 2
    return instant - 1


def any_moment(folder: Path, kills: int = 6) -> int:
    """Kill both ranks at once at a random moment, `kills` times. Returns the newest step."""
    newest, moments = 0, random.Random(0)
    for _ in range(kills):
        children = forked([partial(save_on, folder)] * 2)
        time.sleep(0.3 + 0.5 * moments.random())
        for child in children:
            os.kill(child, signal.SIGKILL)
        ended(children)
        found = next_run(folder, ranks=2)
        assert found >= newest, f"step {found} after step {newest}"
        newest = found
    return newest


def next_run(folder: Path, ranks: int) -> int:
    """The step that a new run goes on from."""
    assert ended(forked([partial(go_on, folder)] * ranks)) == 0, "the next run could not go on"
    return int(folder.with_suffix(".found").read_text())


# What the ranks do ------------------------------------------------------------------------------------


def save_next(folder: Path, killed_at: int = 0) -> None:
    """Go on from the newest checkpoint for one step; its save is killed at instant `killed_at`."""
    checkpointer = Checkpointer(folder, keep_latest_k=1)
    step = restored(checkpointer) + 1
    set_trap(killed_at)
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


def set_trap(instant: int) -> None:
    """SIGKILL at the nth instant: a line of what works on the disk, or a file that it opens or removes. 0 sets none."""
    left = instant

    def pass_instant() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_line(frame, event, argument):
        if event == "line":
            pass_instant()
        return on_line

    writers = {on_disk.write_synced, on_disk.write_marker, on_disk.remove, on_disk.set_aside}
    codes = {writer.__code__ for writer in writers}
    sys.settrace(lambda frame, event, argument: on_line if frame.f_code in codes else None)
    sys.addaudithook(
        lambda event, _: pass_instant() if event in ("open", "os.remove", "os.rmdir", "os.mkdir") else None
    )


if __name__ == "__main__":
    print({"each_instant": each_instant, "any_moment": any_moment}[sys.argv[1]](Path(sys.argv[2])))
