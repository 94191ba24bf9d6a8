"""Families that run: killed in the middle, resumed, past failures, never twice; the array for SLURM."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.ablate.__main__ import STOPPED, main
from recipes.ablate.family import read_family
from recipes.ablate.runs import Planned, Slot, make_slots, plan
from recipes.job import load, to_table
from recipes.result import SHARING, other_recipe
from tests.ablations.made import result
from tests.ranks import ENVIRONMENT, REPOSITORY
from tests.recipes.runs import TINY

FLAGS = ("--training.steps", "12", "--validation.freq", "6", "--checkpoint.interval", "3")
VARIANTS = {
    "no_mtp": '[model.mtp]\nname = "none"',
    "impossible": "[model.ffns.experts]\ntop_k = 99",
    "fails": '[data.sources.sotu]\npath = "there/is/nothing"',
}


def family(folder: Path, *variants: str) -> Path:
    """A family of the tiny recipe."""
    folder.mkdir()
    head = f'claim = "c"\nrefuted_by = "r"\nseeds = 1\nreference = "{TINY}"\ncolumns = ["expert_entropy"]\n'
    (folder / "family.toml").write_text(head + "".join(f'[variants.{v}]\nabout = "{v}"\n' for v in variants))
    for name in variants:
        (folder / f"{name}.toml").write_text(f'base = "{TINY}"\n{VARIANTS[name]}\n')
    return folder


def command(folder: Path, out: Path, *flags: str) -> list[str]:
    return [str(folder), "--folder", str(out), *flags, *FLAGS, "--metrics.no_enable_tensorboard"]


def start(arguments: list[str]) -> subprocess.Popen:
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen([sys.executable, "-m", "recipes.ablate", *arguments], cwd=REPOSITORY, env=environment)


def stop_in_the_middle(process: subprocess.Popen, run: Path) -> int:
    """Asks the command to stop as soon as `run` has saved a checkpoint; its status."""
    while process.poll() is None and not list(run.glob("checkpoint/step-*/COMPLETE")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60)


def written(out: Path) -> dict[str, float]:
    """When each finished run's result was written."""
    return {str(f.parent.relative_to(out)): f.stat().st_mtime for f in out.glob("*/seed-*/result.json")}


def steps(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def test_a_family_is_stopped_resumed_and_reported_past_a_variant_that_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = command(family(tmp_path / "f", "fails", "no_mtp", "impossible"), tmp_path / "out", "--no_figures")
    assert stop_in_the_middle(start(arguments), tmp_path / "out/primary/seed-0") == STOPPED
    assert not (tmp_path / "out/primary/seed-0/result.json").exists()
    assert main(arguments) == 1
    first, said = written(tmp_path / "out"), capfd.readouterr().out
    assert set(first) == {"primary/seed-0", "no_mtp/seed-0"}
    assert "resumed after step" in (tmp_path / "out/primary/seed-0/console.log").read_text()
    assert steps(tmp_path / "out/primary/seed-0") == list(range(1, 13))
    assert "fails seed 0 failed: ended with status 2" in said and "impossible" not in first
    assert "out/fails/seed-0/console.log): " in said and "there/is/nothing does not exist; make it with" in said
    text = (tmp_path / "out/report.md").read_text()
    assert "fails (fails) has no finished run" in text and "impossible (impossible) has no finished run" in text
    assert main([*arguments, "--only_variants", "no_mtp"]) == 0  # nothing is left to do
    assert written(tmp_path / "out") == first


def test_a_result_file_alone_is_a_finished_run_and_another_recipe_in_its_place_is_told(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(REPOSITORY)
    source, out = family(tmp_path / "f"), tmp_path / "out"
    place = out / "primary/seed-0"
    place.mkdir(parents=True)
    (run,), _ = plan(read_family(str(source)), FLAGS, 1, 1, out)
    (place / "result.json").write_text(json.dumps(result([4.0, 3.0]) | {"recipe": run.recipe}))
    assert run.finished() and main(command(source, out, "--no_figures")) == 0
    assert main([*command(source, out, "--no_figures"), "--training.max_norm", "2"]) == 1
    assert "holds a run of another recipe (training.max_norm)" in capfd.readouterr().out


def test_runs_come_seed_by_seed_and_their_flags_make_the_recipes_that_they_are_known_by(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    made = family(tmp_path / "made", "no_mtp")
    runs, _ = plan(read_family(str(made)), list(FLAGS), seeds=3, ranks=1, folder=tmp_path / "out")
    assert [(run.seed, run.variant) for run in runs] == [(s, v) for s in range(3) for v in ("primary", "no_mtp")]
    for run in runs:
        recipe = to_table(load(list(run.flags), needs_data=False))
        assert other_recipe(run.recipe, recipe) == []
        assert recipe["data"]["seed"] == recipe["debug"]["seed"] == run.seed


def test_an_array_script_has_a_task_for_every_run(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    script = tmp_path / "array.sh"
    flags = ["--seeds", "2", "--ranks", "2", "--slurm", str(script), "--training.steps", "40"]
    assert main([str(family(tmp_path / "f", "no_mtp")), *flags]) == 0
    text = script.read_text()
    assert "--array=0-3" in text and "--gpus-per-node=2" in text and "--slurm" not in text
    assert f'-m recipes.ablate {tmp_path}/f --seeds 2 --ranks 2 --training.steps 40 --only "$SLURM_ARRAY' in text
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_a_task_beyond_the_last_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ValueError, match="--only 4: there is no such run; they are numbered 0 to 3"):
        main([str(family(tmp_path / "f", "no_mtp")), "--seeds", "2", "--only", "4"])


def test_numbers_below_1_and_a_folder_that_cannot_be_made_are_told_before_any_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a run was started"))
    made = family(tmp_path / "f")
    for flag in ("--seeds", "--ranks", "--side_by_side"):
        with pytest.raises(SystemExit):
            main([str(made), flag, "0"])
        assert f"{flag} must be at least 1, not 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"\[--folder\]: .*/family.toml/x cannot be made"):
        main([str(made), "--folder", str(made / "family.toml/x")])
    file = made / "family.toml"
    file.write_text(file.read_text().replace("seeds = 1", "seeds = 0"))
    with pytest.raises(ValueError, match="seeds must be at least 1, not 0"):
        read_family(str(made))


def test_runs_side_by_side_have_gpus_of_their_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert make_slots(2, 2) == [Slot("4,5", 1), Slot("6,7", 1)] and make_slots(1, 4) == [Slot(None, 1)]
    with pytest.raises(ValueError, match="3 runs of 2 ranks need 6 GPUs; 4 are there"):
        make_slots(3, 2)


def test_runs_of_one_rank_share_gpus_where_there_are_fewer_and_say_so_in_their_results(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert make_slots(5, 1) == [Slot(gpu, 3) for gpu in "45454"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: env)
    environment = Planned("primary", 0, tmp_path, (), {}, 1).start(Slot("4", 3))
    assert (environment["CUDA_VISIBLE_DEVICES"], environment[SHARING]) == ("4", "3")


@pytest.mark.heavy
def test_the_debug_family_runs_is_killed_resumes_and_reports(tmp_path, monkeypatch):
    """Three recipes, two seeds, as it stands in the repository; minutes."""
    monkeypatch.chdir(REPOSITORY)
    arguments = ["debug", "--folder", str(tmp_path)]
    assert stop_in_the_middle(start(arguments), tmp_path / "no_mtp/seed-0") == STOPPED
    assert main(arguments) == 0
    assert len(written(tmp_path)) == 6
    assert "not separated" in (tmp_path / "report.md").read_text()
