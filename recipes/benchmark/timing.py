"""Clocks and counters for a device, and its two ceilings. Times are ms unless they say otherwise."""

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

SPIN = 24_000_000  # GPU cycles of waiting (12 ms) before each timed call: its launches are queued when it starts
SLOWEST = 50  # names of kernels that are told
LAUNCHES = ("Launch", "Memcpy", "Memset")  # in the names of the driver's and the runtime's calls that start work


class Stopwatch:
    """Moments in the order of the device's work; the host does not wait at any."""

    def __init__(self, device: torch.device):
        self.device = device
        self._moments: list = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            self._moments.append(torch.cuda.Event(enable_timing=True))
            self._moments[-1].record()
        else:
            self._moments.append(time.perf_counter())

    def laps(self) -> list[float]:
        """From each moment to the next; waits for the device."""
        pairs = list(itertools.pairwise(self._moments))
        if self.device.type != "cuda":
            return [1e3 * (after - before) for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


def gpu_time(calls: list[Callable], seconds: float) -> float:
    """Median ms between events around a call whose launches are already queued."""
    warm(calls)
    started, events = time.perf_counter(), []
    while len(events) < 9 or time.perf_counter() - started < seconds:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SPIN)
        begin.record()
        calls[len(events) % len(calls)]()
        end.record()
        events.append((begin, end))
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def wall_time(calls: list[Callable], seconds: float) -> float:
    """Median ms of a call among others that follow at once: the device's work or the host's, whichever is longer."""
    warm(calls)
    started, watch = time.perf_counter(), Stopwatch(torch.device("cuda"))
    watch.mark()
    for call in itertools.cycle(calls):
        call()
        watch.mark()
        if time.perf_counter() - started > seconds:
            break
    return statistics.median(watch.laps())


def warm(calls: list[Callable]) -> None:
    for call in calls:
        call()
    torch.cuda.synchronize()


def extra_memory(call: Callable) -> int:
    """Bytes allocated at the highest point of a call beyond what stood before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def count_launches(call: Callable) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return sum(e.count for e in recorded.key_averages() if e.self_device_time_total > 0)


def host_time(calls: list[Callable], seconds: float) -> float:
    """Median ms of a call that runs on the host."""
    started, times = time.perf_counter(), []
    while len(times) < 3 or time.perf_counter() - started < seconds:
        begin = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def busy(call: Callable) -> dict[str, Any]:
    """Of one call on a CUDA device: ms in which some kernel ran, kernels, calls of the host that started work, and the
    kernels that took most, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events, on_device = recorded.events(), torch.autograd.DeviceType.CUDA
    kernels = [e for e in events if e.device_type == on_device and not e.is_user_annotation]
    launches = sum(e.device_type != on_device and any(word in e.name for word in LAUNCHES) for e in events)
    spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
    times = [(e.name, (e.time_range.end - e.time_range.start) / 1e3) for e in kernels]
    return {"busy_ms": covered(spans) / 1e3, "kernels": len(kernels), "launches": launches, "slowest": slowest(times)}


def slowest(times: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Of (name, ms) of every kernel: the sums by name, the largest first."""
    found: dict[str, dict[str, Any]] = {}
    for name, ms in times:
        row = found.setdefault(name, {"name": name, "ms": 0.0, "kernels": 0})
        row["ms"] += ms
        row["kernels"] += 1
    return sorted(found.values(), key=lambda row: -row["ms"])[:SLOWEST]


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals that are sorted by their start."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def measure_ceilings(device: torch.device | None = None) -> dict[str, float]:
    """Bytes a second of a large copy, read and written; operations a second of a bfloat16 product of 8192 cubed. Of
    the host, should that be `device`, in fp32 and small."""
    device = torch.device("cuda") if device is None else device
    on_cuda = device.type == "cuda"
    side, dtype, clock = (8192, torch.bfloat16, gpu_time) if on_cuda else (512, torch.float32, host_time)
    source = torch.empty(16 * side * side, dtype=dtype, device=device).normal_()
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / clock([lambda: target.copy_(source)], 0.1) * 1e3
    a, b = (x[: side * side].view(side, side) for x in (source, target))
    return {"copy_bytes": copy, "matmul_flops": 2 * side**3 / clock([lambda: a @ b], 0.1) * 1e3}


def device(place: torch.device | None = None) -> dict[str, str]:
    on_cuda = place is None or place.type == "cuda"
    name = torch.cuda.get_device_name(place) if on_cuda else "CPU"
    return {"name": name, "torch": torch.__version__, "triton": importlib.import_module("triton").__version__}
