"""Runs of the tiny recipe that are killed at random moments and started again.

    python -m tests.recipes.crash FOLDER SEED KILLS RANKS [RANKS ...]

FOLDER/unbroken is a run on the last number of RANKS. FOLDER/killed is one that is killed KILLS times on each of the
numbers in turn, then goes to its end on the last. A kill hits all ranks at once, as when a machine goes down, or only
one, so that the others find their peer gone. Both keep their final state in state.pt.
"""

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch.utils.tensorboard  # noqa: F401  before forking: it takes longer than a step

from tests.ranks import ended, forked
from tests.recipes.runs import kept, state, trained

FLAGS = ["--checkpoint.interval", "2", "--checkpoint.async_mode", "async", "--checkpoint.keep_latest_k", "2"]


def unbroken(folder: Path) -> None:
    kept(state(trained(folder, *FLAGS)), folder / "state.pt")


def killed(folder: Path, ranks: int, moments: random.Random) -> None:
    children = forked([partial(unbroken, folder)] * ranks)
    wait_for_a_moment(folder / "metrics.jsonl", children, moments)
    doomed = moments.choice([children, [moments.choice(children)]])
    print(f"SIGKILL: {len(doomed)} of {ranks} ranks, {size(folder / 'metrics.jsonl')} bytes of metrics", flush=True)
    for child in doomed:
        os.kill(child, signal.SIGKILL)
    ended(children)


def wait_for_a_moment(log: Path, children: list[int], moments: random.Random) -> None:
    """Until the run has logged up to four lines, and a bit more: in its start, a step, a save, a validation."""
    lines, before = moments.randrange(5), size(log)
    while lines and all(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for child in children):
        time.sleep(0.005)
        now = size(log)
        lines -= now > before
        before = now
    time.sleep(moments.uniform(0, 0.5))


def size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def main(folder: Path, seed: int, kills: int, numbers: list[int]) -> int:
    moments = random.Random(seed)
    if ended(forked([partial(unbroken, folder / "unbroken")] * numbers[-1])):
        return 1
    for ranks in numbers:
        for _ in range(kills):
            killed(folder / "killed", ranks, moments)
    return ended(forked([partial(unbroken, folder / "killed")] * numbers[-1]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [int(number) for number in sys.argv[4:]]))
