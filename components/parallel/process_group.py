"""The process group: one entrance and one exit for torchrun, SLURM and a plain `python -m`.

Without torchrun's environment it is a group of one rank over an in-process store, so that there is no second code path.
Gloo serves host memory always, NCCL device memory where there is CUDA.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

WATCH_INTERVAL = 0.1  # seconds between looks at the clock: a tenth of the shortest limit


@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank among `ranks`, and the device it computes on."""

    rank: int
    ranks: int
    device: torch.device


def init(init_timeout_seconds: int = 300, device_type: str | None = None) -> Place:
    """Join the group that torchrun describes, or make one of a single rank.

    device_type: "cuda" or "cpu"; None takes CUDA if there is any. Raises ValueError for CUDA without a device for
    this rank.
    """
    device = _device(device_type or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does: sums do not depend on the cores, small tensors wait for no thread
    alone = "RANK" not in os.environ
    where = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=init_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
        **where,
    )
    return Place(dist.get_rank(), dist.get_world_size(), device)


def set_timeout(seconds: int) -> None:
    """The limit of every collective from here on: short once compilation and loading are behind."""
    _set_pg_timeout(timedelta(seconds=seconds))


def shutdown(status: int = 0) -> NoReturn:
    """Leave the group and end the process with `status`.

    Gloo's threads sometimes abort a process that has done all its work ("terminate called without an active
    exception"), and torchrun then reports a failure: so nothing of the interpreter's own shutdown is run. With a
    status other than 0 the other ranks are not waited for.
    """
    if dist.is_initialized() and status == 0:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class StepWatch:
    """Says on stderr which rank stands in which step when a step takes longer than its collectives may.

    The backends' own messages name neither, and NCCL ends the process from a thread of its own. So a thread here
    speaks shortly before, with the Python stack of every thread; it ends nothing. Between steps, and on a single rank,
    which waits for nobody, it is silent.
    """

    def __init__(self, place: Place) -> None:
        self._rank = place.rank
        self._current: tuple[int, float, float] | None = None  # step, its limit in seconds, when it began
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watch", daemon=True)
        if place.ranks > 1:
            self._thread.start()

    @contextmanager
    def step(self, step: int, seconds: float) -> Iterator[None]:
        """Step `step` is made inside; its collectives may take `seconds`."""
        self._current = (step, seconds, time.monotonic())
        try:
            yield
        finally:
            self._current = None

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        spoken = None
        while not self._closed.wait(WATCH_INTERVAL):
            step, seconds, began = self._current or (spoken, 0.0, 0.0)
            if step != spoken and time.monotonic() - began > 0.9 * seconds:
                spoken = step
                print(
                    f"rank {self._rank}: step {step} has not ended in {seconds:.0f} s ([comm] timeouts); a rank that "
                    "does not report this, or stands elsewhere, is the one to look at",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(sys.stderr)


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {index} has no GPU: {torch.cuda.device_count()} visible; start at most that many processes "
            "a node (torchrun --nproc_per_node), or look at CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
