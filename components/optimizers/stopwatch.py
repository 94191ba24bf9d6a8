"""How long stretches of work take on a device, without the host waiting while they are measured."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch


@final
class Stopwatch:
    """Adds up the time of all stretches, each from its first to its last kernel (on the CPU: from begin to end)."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._stretches: list[tuple] = []

    @contextmanager
    def running(self, measured: bool = True) -> Iterator[None]:
        """A stretch, counted where `measured`."""
        begin = self._now() if measured else None
        yield
        if measured:
            self._stretches.append((begin, self._now()))

    def seconds(self) -> float:
        """The sum since it was last asked for. Waits for the device."""
        stretches, self._stretches = self._stretches, []
        if not self._on_cuda:
            return sum(end - begin for begin, end in stretches)
        for _, end in stretches:
            end.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in stretches) / 1000

    def _now(self):
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
