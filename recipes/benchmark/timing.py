"""Clocks for a CUDA device, and its two ceilings."""

import importlib
import statistics
import time
from collections.abc import Callable

import torch

SPIN = 4_000_000  # GPU cycles of waiting before each timed call, so that its launches are queued when it starts


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
    """Median ms of one call alone, from an idle GPU to an idle GPU."""
    warm(calls)
    started, times = time.perf_counter(), []
    while len(times) < 9 or time.perf_counter() - started < seconds:
        begin = time.perf_counter()
        calls[len(times) % len(calls)]()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


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


def measure_ceilings() -> dict[str, float]:
    """Bytes a second of a large copy, read and written; operations a second of a bfloat16 product of 8192 cubed."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy = 4 * source.numel() / gpu_time([lambda: target.copy_(source)], 0.1) * 1e3
    a, b = source[: 2**26].view(8192, 8192), target[: 2**26].view(8192, 8192)
    return {"copy_bytes": copy, "matmul_flops": 2 * 8192**3 / gpu_time([lambda: a @ b], 0.1) * 1e3}


def device() -> dict[str, str]:
    triton = importlib.import_module("triton")
    return {"name": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
