"""The commands around data, and the tables of the real mixtures."""

import tomllib
from pathlib import Path

import pytest
import tomli_w

import registry
from components.data.sources import Hub
from recipes import inspect_data, prepare_data, train_tokenizer

TABLES = sorted(Path("train_configs/data").glob("*.toml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_every_table_is_read(path):
    plan = prepare_data.read_plan(str(path))
    assert sum(s.weight for s in plan.sources.values()) == pytest.approx(1.0)
    assert sum(plan.target(name) for name in plan.sources) == pytest.approx(plan.output.target_tokens, abs=10)


def test_hymo_mixture_is_the_specifications():
    plan = prepare_data.read_plan("train_configs/data/hymo.toml")
    weights = [0.50, 0.14, 0.10, 0.03, 0.02, 0.08, 0.05, 0.04, 0.03, 0.01]
    assert [s.weight for s in plan.sources.values()] == weights
    assert plan.sources["fineweb_edu"].select.min_score == 3.0
    assert plan.target("fineweb_edu") / 0.5 >= 57_220 * 524_288, "one pass is enough for the whole run"


@pytest.mark.parametrize(
    ("table", "recipe"),
    [
        ("data/hymo", "hymo_primary"),
        ("data/debian", "scales/debian_text"),
        ("data/debian_small", "scales/debian_small"),
    ],
    ids=["hymo", "debian", "debian_small"],
)
def test_what_a_table_makes_is_what_the_recipe_reads(table, recipe):
    plan = prepare_data.read_plan(f"train_configs/{table}.toml")
    content = tomllib.loads(Path(f"train_configs/{recipe}.toml").read_text())
    sources = {n: s for n, s in content["data"]["sources"].items() if n != "name"}
    made = {n: {"path": str(plan.folder(n)), "weight": s.weight} for n, s in plan.sources.items()}
    assert made == sources


def test_the_hub_is_asked_for_the_commit_folder_and_subset_of_the_table():
    table = {"path": "bigcode/starcoderdata", "data_dir": "python", "revision": "9fc30b5", "subset": "x"}
    source = registry.parse_component("source", {"name": "hub", **table}).build()
    assert isinstance(source, Hub) and source.arguments() == {
        "path": "bigcode/starcoderdata", "name": "x", "data_dir": "python", "split": "train", "revision": "9fc30b5",
    }  # fmt: skip


def test_a_dry_run_of_the_real_mixture_needs_no_network(capsys, tmp_path):
    path = "train_configs/data/hymo.toml"
    assert prepare_data.command([path, "--dry-run", "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("fineweb_edu", "15,015,000,000", "Needs 61.9 GB", "2 bytes a token"))
    assert not (tmp_path / "out").exists()


def test_a_trained_tokenizer_is_one_that_a_recipe_can_name(tmp_path, capsys):
    read = {"name": "jsonl", "files": ["assets/corpus/*.jsonl.gz"]}
    table = tmp_path / "table.toml"
    content = {"output": {"folder": "x"}, "tokenizer": {"name": "hymo_bpe_4k"}, "sources": {"a": {"read": read}}}
    table.write_text(tomli_w.dumps(content))
    out = str(tmp_path / "mine.tiktoken")
    arguments = [str(table), "--out", out, "--words", "4080", "--characters"]
    assert train_tokenizer.command([*arguments, "700000"]) == 0
    assert "bytes per token" in capsys.readouterr().out
    trained = registry.parse_component("tokenizer", {"name": "hymo_bpe_4k", "path": out}).build()
    assert trained.decode(trained.encode("To be, or not to be: naïve 日本")) == "To be, or not to be: naïve 日本"
    assert train_tokenizer.command([*arguments, "1000"]) == 2
    assert "raise --characters or lower --words" in capsys.readouterr().out


def test_inspection_shows_shares_text_tokens_and_lengths(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "lengths.png"
    recipe = ["--job.config_file", "train_configs/hymo_debug.toml"]
    assert inspect_data.main([*recipe, "--step", "3", "--rows", "1", "--plot", str(plot), "--data.workers", "0"]) == 0
    said = capsys.readouterr().out
    assert all(w in said for w in ("mixture after step 3", "sequence ", "unigram entropy", "document lengths"))
    assert plot.stat().st_size > 1000
