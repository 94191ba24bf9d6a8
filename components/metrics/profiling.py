"""Traces of what a step does, and of who holds device memory, on request ([profiling]).

    <dump folder>/profile_traces/iteration_N/rankR_trace.json         open in Perfetto or chrome://tracing
    <dump folder>/memory_snapshot/iteration_N/rankR_snapshot.pickle   open at https://pytorch.org/memory_viz

Names as in TorchTitan. In every `freq` steps the last one is recorded, after one that warms the profiler up.
"""

import warnings
from pathlib import Path
from types import TracebackType
from typing import final

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SNAPSHOT_EVENTS = 100_000


@final
class Profiler:
    """Context of the training loop; `step(n)` at the end of each optimizer step n. Off, it does nothing.

    Memory snapshots need CUDA. On the way out through an exception (out of memory) one is written too.
    """

    def __init__(
        self,
        dump_folder: Path | str,
        *,
        rank: int,
        freq: int = 10,
        enable_profiling: bool = False,
        enable_memory_snapshot: bool = False,
    ) -> None:
        if enable_memory_snapshot and not torch.cuda.is_available():
            raise ValueError("[profiling] enable_memory_snapshot needs a CUDA device; switch it off on the CPU")
        self._folder, self._rank, self._freq = Path(dump_folder), rank, freq
        self._snapshots = enable_memory_snapshot
        self._profile = self._new_profile() if enable_profiling else None
        self._step = 0

    def __enter__(self) -> "Profiler":
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        if self._profile is not None:
            # Each cycle's events are written out before the next clears them.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profile.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._profile is not None:
            self._profile.stop()
        if self._snapshots:
            if error is not None:
                self._snapshot("exit")
            torch.cuda.memory._record_memory_history(enabled=None)

    def step(self, step: int) -> None:
        """Optimizer step `step` has ended."""
        self._step = step
        if self._profile is not None:
            self._profile.step()
        if self._snapshots and step % self._freq == 0:
            self._snapshot(f"iteration_{step}")

    def _new_profile(self) -> profile:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        return profile(
            activities=activities,
            schedule=schedule(wait=self._freq - 2, warmup=1, active=1),
            on_trace_ready=self._trace,
            record_shapes=True,
        )

    def _trace(self, recorded: profile) -> None:
        folder = self._folder / "profile_traces" / f"iteration_{self._step}"
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(folder / f"rank{self._rank}_trace.json"))

    def _snapshot(self, name: str) -> None:
        folder = self._folder / "memory_snapshot" / name
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank{self._rank}_snapshot.pickle"))
