"""The README's worked example and the checkpoints' program, exactly as they stand there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the README shows, in a folder outside the repository; the recipe's parent found from there."""
    folder = tmp_path_factory.mktemp("example")
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", README, re.DOTALL):
        (folder / name).write_text(text.replace('base = "', f'base = "{REPOSITORY}/'))
    assert sorted(p.name for p in folder.iterdir()) == ["token_shift.py", "token_shift.toml"]
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{folder}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_example_component_trains_through_the_entrypoint(folder):
    flags = ["--training.steps", "2", "--job.dump_folder", str(folder / "out"), "--validation.batches", "1"]
    flags += ["--training.global_batch_size", "8", "--validation.prompts", "To be"]
    done = run(folder, "-m", "recipes.pretrain", "--job.config_file", str(folder / "token_shift.toml"), *flags)
    assert done.returncode == 0, done.stderr
    assert "token_shift" in done.stdout and "held-out loss" in done.stdout


def test_the_program_that_reads_a_checkpoint_judges_and_questions_its_model(folder):
    """The run is the example component's."""
    [program] = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/checkpoints.md").read_text(), re.DOTALL)
    mine = program.replace("outputs/hymo_debug", str(folder / "out")).replace('batches", "4"', 'batches", "1"')
    done = run(folder, "-c", mine)
    logged = json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert done.returncode == 0 and f"'validation/loss': {logged['validation/loss']}" in done.stdout, done.stderr
    assert "\nTo be, or" in done.stdout


def test_the_example_component_keeps_the_contract_of_mixers(folder):
    cases = REPOSITORY / "tests" / "contracts" / "test_mixers.py"
    program = f"import token_shift, pytest, sys; sys.exit(pytest.main(['-q', '-k', 'token_shift', r'{cases}']))"
    done = run(folder, "-c", program)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def test_the_example_component_replaces_a_mixer_of_chimera_in_one_line(folder):
    """Of looped layers, too, that a wire tells which pass it is."""
    recipe = folder / "chimera_shift.toml"
    parts = [f'base = "{REPOSITORY}/train_configs/chimera_debug.toml"', 'job.imports = ["token_shift"]']
    recipe.write_text("\n".join([*parts, 'model.mixers.gdn = { name = "token_shift", hidden = 96 }']))
    flags = ["--training.steps", "2", "--job.dump_folder", str(folder / "chimera"), "--validation.batches", "1"]
    flags += ["--training.global_batch_size", "8", "--training.seq_len", "32", "--validation.prompts", "To be"]
    done = run(folder, "-m", "recipes.pretrain", "--job.config_file", str(recipe), *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("token_shift") >= 2 and "held-out loss" in done.stdout


def test_every_file_the_readme_links_to_or_runs_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    run = re.findall(r"(?<![\w/])(?:train_configs|launch)/[\w/]+\.(?:toml|sh)", README)
    assert len(links) > 5 and len(run) > 5
    assert not [name for name in {*links, *run} if not (REPOSITORY / name).exists()]
