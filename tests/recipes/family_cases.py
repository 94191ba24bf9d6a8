"""The debug recipes of the other families, a few steps of each: they learn, and go on bit for bit after a crash."""

from contextlib import closing
from pathlib import Path

from components.checkpoint.signals import StopRequest
from recipes import pretrain
from recipes.job import load
from tests.ranks import REPOSITORY
from tests.recipes.runs import assert_same_lines, assert_same_state, continued, lines, place, state

FLAGS = (
    "--training.steps", "8", "--training.seq_len", "64", "--training.local_batch_size", "8",
    "--training.global_batch_size", "8", "--checkpoint.interval", "4", "--validation.freq", "4",
    "--validation.batches", "1", "--validation.prompts", "--metrics.log_freq", "1",
    "--optimizer.embedding.lr", "6e-3",
)  # fmt: skip


def learns_and_resumes(folder: Path, family: str) -> None:
    unbroken = trained(folder / family, family)
    first, last = (line["validation/loss"] for line in lines(folder / family) if "validation/loss" in line)
    assert last < first - 0.02, f"held-out loss {first} after 4 steps, {last} after 8"
    root = continued(folder / family, folder / f"{family} again", step=4)
    assert_same_state(state(trained(root, family)), state(unbroken))
    assert_same_lines(lines(root), lines(folder / family))


def trained(folder: Path, family: str) -> pretrain.Run:
    recipe = REPOSITORY / "train_configs" / f"{family}_debug.toml"
    job = load(["--job.config_file", str(recipe), "--job.dump_folder", str(folder), *FLAGS], ranks=1)
    with closing(StopRequest()) as stop:
        return pretrain.train(job, place(), stop)


def test_chimera_learns_and_a_resumed_run_equals_the_unbroken_one(folder: Path):
    learns_and_resumes(folder, "chimera")


def test_swarm_learns_and_a_resumed_run_equals_the_unbroken_one(folder: Path):
    learns_and_resumes(folder, "swarm")


def test_uffn_with_ghost_attention_learns_and_a_resumed_run_equals_the_unbroken_one(folder: Path):
    learns_and_resumes(folder, "uffn")
