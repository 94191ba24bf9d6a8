"""Traces and memory snapshots on request."""

import json

import pytest
import torch

from components.metrics.profiling import Profiler


def test_the_last_of_every_freq_steps_is_traced_under_its_number(tmp_path):
    with Profiler(tmp_path, rank=0, freq=3, enable_profiling=True) as profiler:
        for step in range(1, 8):
            torch.ones(2) + torch.ones(2)
            profiler.step(step)
    traces = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    assert traces == [f"profile_traces/iteration_{step}/rank0_trace.json" for step in (3, 6)]
    names = {event.get("name") for event in json.loads((tmp_path / traces[0]).read_text())["traceEvents"]}
    assert "aten::add" in names


def test_switched_off_it_writes_nothing(tmp_path):
    with Profiler(tmp_path, rank=0) as profiler:
        profiler.step(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_memory_snapshots_are_refused_without_cuda(tmp_path):
    with pytest.raises(ValueError, match="enable_memory_snapshot needs a CUDA device"):
        Profiler(tmp_path, rank=0, enable_memory_snapshot=True)


@pytest.mark.gpu
def test_a_memory_snapshot_is_written_every_freq_steps(tmp_path):
    with Profiler(tmp_path, rank=0, freq=3, enable_memory_snapshot=True) as profiler:
        for step in range(1, 4):
            torch.ones(2, device="cuda")
            profiler.step(step)
    assert (tmp_path / "memory_snapshot" / "iteration_3" / "rank0_snapshot.pickle").stat().st_size > 0
