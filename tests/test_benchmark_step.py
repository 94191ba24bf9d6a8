"""The benchmark of a whole step: its figures of a tiny recipe on the CPU, and how it counts."""

import io
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from recipes.benchmark import parts
from recipes.benchmark.show import _ranks, _slowest
from recipes.benchmark.timing import covered, slowest
from tests.models import tiny
from tests.ranks import REPOSITORY, rank_environment


def command(file, *flags):
    """Of the tiny recipe with its text and its tokenizer's file taken away."""
    program = [sys.executable, "-m", "recipes.benchmark", "step", "--job.config_file", "tests/recipes/tiny.toml"]
    missing = ("--data.sources.sotu.path", "nowhere", "--tokenizer.path", "nowhere.tiktoken")
    return [*program, *missing, "--json-file", str(file), "--steps", "1", *flags]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """What the command prints and writes."""
    file = tmp_path_factory.mktemp("benchmark") / "step.json"
    flags = ("--compile.backend", "aot_eager", "--micro_batches", "2", "--accumulation", "3")
    done = subprocess.run(command(file, *flags), cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_speeds_follow_from_the_times_and_the_tokens(benchmark):
    _, figures = benchmark
    assert figures["tokens"] == {"micro_batch": 32, "step": 96, "recipe": 20 * 128}
    assert figures["step"]["micro_batches"] == 3
    for row, tokens in ((figures["forward_backward"], 32), (figures["step"], 96)):
        assert row["tps"] == pytest.approx(1e3 * tokens / row["ms"])
        assert row["tflops"] == pytest.approx(row["tps"] * figures["flops_per_token"] / 1e12)
        assert row["ceiling_share"] == pytest.approx(1e14 * row["tflops"] / figures["ceilings"]["matmul_flops"])
        assert row["mfu"] is None  # a CPU has no stated peak


def test_each_optimisation_has_its_row_and_one_that_fails_says_why_and_stops_no_other(benchmark):
    printed, figures = benchmark
    rows = {row["on"]: row for row in figures["optimisations"]}
    assert list(rows) == ["none", "fused_gdn", "moe_mixed_precision", "compile", "cuda_graph", "all"]
    for name in ("none", "fused_gdn", "moe_mixed_precision", "compile"):
        assert rows[name]["loss"] == pytest.approx(figures["forward_backward"]["loss"], rel=1e-5)
        assert rows[name]["tps"] > 0
    for name in ("cuda_graph", "all"):
        assert "no CUDA device" in rows[name]["error"]
        assert f"{name} failed: [cuda_graph]" in printed


def test_random_tokens_cost_what_a_uniform_guess_costs(benchmark):
    printed, figures = benchmark
    assert "random tokens" in printed
    assert figures["forward_backward"]["loss"] == pytest.approx(math.log(4096), rel=0.02)


def test_every_optimizer_and_every_part_of_the_model_is_timed(benchmark):
    _, figures = benchmark
    assert {"clip", "normuon of matrix", "adamw of expert", "balance"} <= set(figures["update_ms"])
    assert sum(figures["update_ms"].values()) < figures["step"]["ms"]
    assert set(figures["parts_ms"]) == {
        "mixer gdn", "mixer mla", "ffn experts", "heads and loss", "optimizer", "rest"
    }  # fmt: skip


def test_on_two_ranks_the_optimizer_is_timed_on_each(tmp_path):
    file = tmp_path / "step.json"
    flags = "--no_parts --no_optimisations --compile.enable=false --micro_batches 1 --accumulation 1"
    program = command(file, *flags.split())
    ranks = [
        subprocess.Popen(program, cwd=REPOSITORY, env=os.environ | rank, stdout=subprocess.PIPE, text=True)
        for rank in rank_environment(2)
    ]
    printed, _ = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    figures = json.loads(file.read_text())
    assert figures["forward_backward"]["loss"] == pytest.approx(math.log(4096), rel=0.02)
    rows = figures["by_rank_ms"]
    assert len(rows) == 2 and all(0 < row["orthogonalising"] < row["optimizer"] for row in rows)
    times = [row["orthogonalising"] for row in rows]
    assert "the optimizer by rank" in printed and f"slowest / mean  {2 * max(times) / sum(times):>19.3f}" in printed


def test_backward_work_belongs_to_the_part_whose_forward_made_it(monkeypatch):
    model, batch = tiny.model(dtype=torch.float32), tiny.batch(tiny.tokens())
    optimizer = SimpleNamespace(clip=None, step=None)
    found = []

    def noted(event, nodes, original=parts._part):
        part = original(event, nodes)
        found.append((event.name, part))
        return part

    monkeypatch.setattr(parts, "_part", noted)
    parts.time_by_part(model, optimizer, lambda: model(batch).loss_sums.sum().backward(), torch.device("cpu"))
    owner = dict(found)
    assert owner["_GatedDeltaRule"] == owner["_GatedDeltaRuleBackward"] == "mixer gdn"
    assert owner["hymo::linear_cross_entropy"] == owner["hymo::linear_cross_entropy_backward"] == parts.HEADS
    nodes = {part for name, part in found if name.startswith("autograd::engine::evaluate_function")}
    assert nodes == {"mixer gdn", "mixer mla", "ffn experts", parts.HEADS, parts.REST}
    assert {part for name, part in found if name == "aten::embedding_dense_backward"} == {parts.REST}
    assert optimizer.clip is None and "loss" in vars(model)


def test_time_in_which_kernels_overlap_counts_once():
    assert covered([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)]) == 4.0
    assert covered([]) == 0.0


def test_names_of_kernels_are_shown_as_they_are():
    rows = [{"name": "copy[/b]<float>", "ms": 3.0, "kernels": 8}]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_slowest({"micro_batches": 4, "busy_ms": 6.0, "slowest": rows}))
    assert console.export_text().splitlines()[1].split() == ["copy[/b]<float>", "0.75", "2", "50.0%"]


def test_ranks_that_orthogonalise_nothing_are_shown_too():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_ranks([{"orthogonalising": 0.0, "optimizer": ms} for ms in (1.0, 3.0)]))
    assert console.export_text().splitlines()[-1].split() == ["slowest", "/", "mean", "1.500"]


def test_kernels_of_one_name_are_told_together_the_slowest_first():
    assert slowest([("a", 1.0), ("b", 1.5), ("a", 2.0)]) == [
        {"name": "a", "ms": 3.0, "kernels": 2}, {"name": "b", "ms": 1.5, "kernels": 1}
    ]  # fmt: skip
