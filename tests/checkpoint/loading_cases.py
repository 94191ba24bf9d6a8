"""What other numbers of ranks make of a checkpoint that four saved (saving_cases.py)."""

from pathlib import Path

from components.checkpoint.checkpointer import Checkpointer
from components.checkpoint.state import model_state, optimizer_state
from tests.checkpoint.small_models import check, folded, optimizer_views, sharded, unfolded


def _loads(folder: Path, model, step: int) -> None:
    tensors = model_state(model) | optimizer_state(optimizer_views(model))
    Checkpointer(folder / "four").load(step, tensors)
    check(tensors, seed=step)


def test_it_loads_where_experts_are_folded_too(folder: Path):
    _loads(folder, sharded(folded()), step=10)


def test_it_loads_where_every_expert_has_its_own_parameter(folder: Path):
    _loads(folder, sharded(unfolded()), step=20)


def test_it_loads_without_sharding(folder: Path):
    _loads(folder, unfolded(), step=10)


def test_weights_load_without_optimizer_state(folder: Path):
    tensors = model_state(sharded(unfolded()))
    Checkpointer(folder / "four").load(10, tensors, ignore=("optimizer.",))
    check(tensors, seed=10)
