"""Readings, warnings and reports of made runs, and recipes.compare over them."""

import csv
import json
import subprocess
import sys

import pytest

from recipes import compare
from recipes.ablate.figures import draw
from recipes.ablate.measure import columns, common_end, reading
from recipes.ablate.report import Group, Report, markdown, rounded, write_report
from recipes.result import other_recipe, spikes
from tests.ablations.made import recipe, result, write
from tests.ranks import REPOSITORY


def report(**of_variant) -> Report:
    """A reference that ends at 3.0 + a little a seed, and a variant that ends 0.1 above it."""
    base = {seed: result([5.0, 4.0, 3.5, 3.0 + 0.01 * seed], seed) for seed in range(3)}
    other = {seed: result([5.1, 4.1, 3.6, 3.1 + 0.011 * seed], seed, **of_variant) for seed in range(3)}
    return Report("made", [Group("primary", base), Group("other", other, "a change", at_least=0.05)], "c", "r")


def test_a_run_is_read_between_its_validations_and_nowhere_else():
    made = result([5.0, 4.0, 3.5, 3.0])
    assert reading(made, "tokens", 100_000) == 3.0
    assert reading(made, "tokens", 62_500) == pytest.approx(3.75)
    assert reading(made, "tokens", 10_000) is None and reading(made, "tokens", 200_000) is None
    assert reading(made, "seconds", 25.0) == pytest.approx(4.0)


def test_equal_flops_end_where_the_cheapest_variant_does():
    """At twice the FLOPs a token the variant has seen half the tokens by then."""
    found = report(flops=2e6)
    assert common_end(found.results(), "FLOPs") == 1e11
    assert found.readings(found.groups[1], "FLOPs", "loss") == pytest.approx({0: 4.1, 1: 4.1, 2: 4.1})
    assert found.readings(found.reference, "FLOPs", "loss")[1] == pytest.approx(3.01)


def test_a_report_says_along_what_runs_are_read_before_their_end_and_nothing_where_none_is():
    assert "before their end (at equal FLOPs)" in markdown(report(flops=2e6))
    assert "before their end (at equal time)" in markdown(report(step_seconds=0.25))
    assert "before their end" not in markdown(report())


def test_equal_time_ends_where_the_fastest_variant_does():
    found = report(step_seconds=0.25)
    assert common_end(found.results(), "seconds") == 25.0
    assert found.readings(found.reference, "seconds", "loss")[0] == pytest.approx(4.0)


def test_a_report_says_worse_and_that_the_claim_is_met():
    text = markdown(report())
    assert "+0.1010 [+0.0985, +0.1035], worse" in text and "≥ 0.05: met" in text and "⚠" not in text


def test_a_bound_is_judged_at_equal_tokens():
    """At equal time this variant, which is twice as fast, is 0.9 nats better and would refute it."""
    assert "-0.9" in markdown(report(step_seconds=0.25)) and "≥ 0.05: met" in markdown(report(step_seconds=0.25))


def test_a_variant_of_another_size_is_marked_with_both_numbers():
    text = markdown(report(active=1100, flops=2e6))
    assert "| other ⚠ |" in text
    assert "⚠ other differs in active parameters (1,100 against 1,000), FLOPs a token (2,000,000 against 1,0" in text


def test_a_variant_that_saw_fewer_tokens_is_marked():
    found = report()
    for made in found.groups[1].runs.values():
        made["tokens"] //= 2
    assert "⚠ other differs in tokens (50,000 against 100,000)" in markdown(found)


def test_runs_that_shared_a_device_are_not_compared_by_time_or_speed():
    found = report()
    for made in found.results():
        made["summary"]["tps"] = {"median": 1000.0}
    assert "tok/s a device" in markdown(found) and "at equal time" in markdown(found)
    found.groups[1].runs[0]["runs_a_device"] = 4
    text = markdown(found)
    assert "⚠ Runs shared devices" in text and "tok/s a device" not in text
    assert "at equal time |" not in text and "+0.1010" in text


def test_numbers_of_a_report_have_the_digits_they_are_worth_and_no_exponent_of_ten():
    found = report()
    for made, speed in zip(found.reference.runs.values(), (108_500.0, 109_000.0, 109_300.0), strict=True):
        made["summary"]["tps"] = {"median": speed}
    assert "| 108,900 ± 1,000 |" in markdown(found) and "100,000 tokens" in markdown(found)
    assert [rounded(n, 2) for n in (0.0, 9.96, 0.0234)] == ["0", "10", "0.023"]


def test_files_of_a_report_hold_the_same_numbers_and_figures_are_drawn(tmp_path):
    write_report(report(), tmp_path)
    draw(report(), tmp_path)
    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    found = {row["seed"]: row["loss at equal tokens"] for row in rows if row["variant"] == "other"}
    assert float(found["difference"]) == pytest.approx(0.101) and found["verdict"] == "worse"
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "loss.png", "differences.png", "training.png", "expert_load.png"
    }  # fmt: skip


def test_one_seed_gives_numbers_without_intervals():
    groups = [Group(name, {0: result([4.0, last])}) for name, last in (("primary", 3.0), ("other", 2.9))]
    text = markdown(Report("made", groups))
    assert "-0.1000, one seed" in text and "±" not in text.split("## Difference")[1].split("## Perplexity")[1]


def test_compare_groups_runs_by_recipe_and_refuses_what_is_no_finished_run(tmp_path, capsys):
    folders = [write(tmp_path / "a" / f"seed-{s}", result([4.0, 3.0], s)) for s in range(2)]
    other = result([4.0, 2.0])
    other["recipe"] = recipe(0, dtype="float32")
    folders.append(write(tmp_path / "b", other))
    found = compare.grouped(folders)
    assert [(g.name, sorted(g.runs)) for g in found] == [("a", [0, 1]), ("b", [0])]
    assert compare.main([*map(str, folders), "--to", str(tmp_path / "to"), "--no_figures"]) == 0
    assert "| b |" in (tmp_path / "to" / "report.md").read_text()
    with pytest.raises(ValueError, match="has not finished"):
        compare.grouped([tmp_path])
    with pytest.raises(ValueError, match="second run of that recipe with seed 1"):
        compare.grouped([*folders, write(tmp_path / "again", result([4.0, 3.0], 1))])


@pytest.mark.parametrize("newer", [0, 1])
def test_compare_takes_a_run_from_before_a_key_existed_for_one_with_its_default(newer, tmp_path):
    """As a command: what no recipe has been loaded for knows no components yet."""
    folders = [tmp_path / "primary" / f"seed-{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        written = REPOSITORY / "docs/results/b_optimizers/primary" / folder.name / "result.json"
        made = json.loads(written.read_text())
        if seed == newer:
            made["recipe"]["training"]["master_dtype"] = "float32"
            made["recipe"]["model"]["mixers"]["gdn"]["chunk"] = 0
        write(folder, made)
    command = [sys.executable, "-m", "recipes.compare", *map(str, folders), "--to", str(tmp_path), "--no_figures"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| primary | 2 |" in (tmp_path / "report.md").read_text()


def test_the_loss_at_other_lengths_is_a_column_a_length():
    made = result([4.0, 3.0])
    made["validations"][-1] |= {"validation/at_8192/loss": 3.25, "validation/at_8192/bpb": 1.0}
    found = columns(made, ["loss_at", "bpb_at"])
    assert found == {"held-out loss at length 8192": 3.25, "bits per byte at length 8192": 1.0}


def test_times_of_the_optimizer_step_are_columns_by_rank_and_the_slowest_over_the_mean():
    made = result([4.0, 3.0])
    made["summary"] |= {f"time/orthogonalising/{rank}": {"median": s} for rank, s in enumerate((0.01, 0.03))}
    found = columns(made, ["orthogonalising_time", "orthogonalising_balance", "optimizer_time"])
    assert found == {
        "orthogonalising, ms, rank 0": 10,
        "orthogonalising, ms, rank 1": 30,
        "orthogonalising, slowest rank / mean": 1.5,
    }
    assert columns(result([4.0]), ["orthogonalising_balance"]) == {}


def test_a_recipe_is_the_same_wherever_it_is_kept():
    moved = recipe(0) | {"job": {"dump_folder": "elsewhere"}, "checkpoint": {"interval": 5}}
    assert not other_recipe(recipe(0), moved)
    assert other_recipe(recipe(0), recipe(0, steps=7)) == ["training.steps"]
    assert other_recipe(recipe(0), recipe(1)) == ["data.seed", "debug.seed"]


def test_a_spike_is_a_jump_above_the_lines_before_or_no_number():
    assert spikes([5.0, 4.0, 3.9, 3.8, 3.7]) == 0
    assert spikes([4.0, 3.9, 5.0, 3.8, 3.7, None]) == 2
    assert spikes([10 - 0.2 * i for i in range(30)] + [6.0]) == 1, "of a loss that once was higher"
