"""The benchmark of lengths: tiny recipes on the CPU, and what decoding keeps of the real ones."""

import json
import subprocess
import sys

import pytest

from recipes.benchmark.length import kept
from recipes.job import load
from tests.ranks import REPOSITORY


def run(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "recipes.benchmark", "length", "--job.config_file", "tests/recipes/tiny.toml"]
    return subprocess.run([*command, *flags], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


def test_two_recipes_are_measured_at_equal_tokens_and_one_that_fails_says_why_and_stops_no_other(tmp_path):
    file, picture, recorded = tmp_path / "length.json", tmp_path / "length.png", tmp_path / "recorded.toml"
    recorded.write_text(f'base = "{REPOSITORY}/tests/recipes/tiny.toml"\n[cuda_graph]\nenable = true\n')
    flags = ["--lengths", "16", "64", "--micro_batches", "2", "--json-file", str(file), "--figure", str(picture)]
    done = run("--against", str(recorded), *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    shapes = [(row["recipe"], row["sequences"], row["length"]) for row in rows]
    assert shapes == [("tiny", 4, 16), ("tiny", 1, 64), ("recorded", 4, 16), ("recorded", 1, 64)]
    assert [row["tps"] for row in rows[:2]] == pytest.approx([1e3 * 64 / row["ms"] for row in rows[:2]])
    assert rows[0]["flops_per_token"] < rows[1]["flops_per_token"]
    assert all("no CUDA device" in row["error"] for row in rows[2:])
    assert "4 × 16" in done.stdout and "recorded at 64 failed" in done.stdout and picture.stat().st_size > 1000


def test_lengths_that_do_not_divide_the_tokens_are_refused():
    done = run("--lengths", "48", "--tokens", "64")
    assert done.returncode == 1 and "no whole number of rows of 48" in done.stderr


def test_only_attention_keeps_more_with_every_token():
    def of(name: str) -> tuple[float, int]:
        found = kept(load(["--job.config_file", f"train_configs/{name}.toml"], needs_data=False), 4096)
        return found["cache_bytes_a_token"], found["state_bytes"]

    hybrid, attention = of("hymo_primary"), of("hymo_attention")
    assert [hybrid[0], attention[0]] == [8 * 160 * 2, 32 * 160 * 2]
    assert hybrid[1] > 24 * 40 * 32 * 32 * 4 > 1000 * attention[1]
