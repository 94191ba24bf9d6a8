"""What four ranks save."""

import json
import random
from pathlib import Path

import numpy as np
import torch

from components.checkpoint.checkpointer import Checkpointer
from components.checkpoint.random_state import random_states, restore_random_states
from components.checkpoint.state import model_state, optimizer_state
from tests.checkpoint.small_models import check, fill, folded, optimizer_views, sharded


def everything(model) -> dict:
    return model_state(model) | optimizer_state(optimizer_views(model))


def test_some_rank_holds_nothing_of_some_tensor():
    assert len(model_state(sharded(folded()))) < len(model_state(folded()))


def test_a_sharded_save_loads_on_the_same_ranks(folder: Path):
    tensors = everything(sharded(folded()))
    fill(tensors, seed=10)
    checkpointer = Checkpointer(folder / "four")
    checkpointer.save(10, tensors, {"tokens": 7})
    fill(tensors, seed=0)
    assert Checkpointer(folder / "four").load(10, tensors) == {"tokens": 7}
    check(tensors, seed=10)


def test_training_may_go_on_while_a_save_is_being_written(folder: Path):
    tensors = everything(sharded(folded()))
    checkpointer = Checkpointer(folder / "four", async_mode="async")
    checkpointer.load(10, tensors)
    fill(tensors, seed=20)
    checkpointer.save(20, tensors, {})
    fill(tensors, seed=0)
    assert checkpointer.latest() == 20
    checkpointer.load(20, tensors)
    check(tensors, seed=20)


def test_random_states_continue_where_they_were_saved(folder: Path):
    def drawn() -> list[float]:
        return [*torch.rand(3).tolist(), *np.random.rand(3), random.random()]

    states = json.loads(json.dumps(random_states(Checkpointer(folder / "none").group)))
    first = drawn()
    assert restore_random_states(states)
    assert drawn() == first
    assert not restore_random_states(states[:1])


def test_a_damaged_file_is_found_by_whichever_rank_reads_it(folder: Path):
    checkpointer = Checkpointer(folder / "damaged")
    checkpointer.save(1, everything(sharded(folded())), {})
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path = folder / "damaged" / "step-1" / "__3_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    try:
        checkpointer.load(1, everything(sharded(folded())))
    except ValueError as error:
        assert "__3_0.distcp has" in str(error)
    else:
        raise AssertionError("loaded a damaged file")
