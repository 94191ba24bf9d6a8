"""The states of all random number generators, as JSON, so that a resumed run draws what the unbroken one would have.

Weights are drawn by name and data by index, without state; what is left is whatever a part draws while training.
On another number of ranks there is no meaningful state to restore, and each rank keeps the one it was seeded with.
"""

import base64
import random

import numpy as np
import torch
import torch.distributed as dist


def random_states(group: dist.ProcessGroup) -> list[dict]:
    """The states of every rank, in rank order. Collective over `group` (gloo)."""
    states: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, _own(), group=group)
    return states


def restore_random_states(states: list[dict]) -> bool:
    """Put this rank's generators where `random_states` found them; False, and nothing done, on another rank count."""
    if len(states) != dist.get_world_size():
        return False
    state = states[dist.get_rank()]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    return True


def _own() -> dict:
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
