"""A tiny HyMo: the stack's shape, a few thousand parameters, float64."""

import copy

import torch

import registry
from components.data.batch import Batch
from components.models.stacked_lm import TINY_EXAMPLE, StackedLM
from components.parameters import initialise

VOCAB = TINY_EXAMPLE["vocab_size"]


def config(**changes):
    """The example's component, with top-level keys of the table replaced."""
    registry.discover()
    return registry.parse_component("model", {"name": "stacked_lm", **copy.deepcopy(TINY_EXAMPLE), **changes})


def model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> StackedLM:
    built = config(**changes).build()
    initialise(built, seed)
    built.reset_buffers()
    return built.to(dtype)


def tokens(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(seed))


def batch(tokens_BT1: torch.Tensor, document_BT1: torch.Tensor | None = None) -> Batch:
    rows, length = tokens_BT1.shape[0], tokens_BT1.shape[1] - 1
    place = torch.arange(length).expand(rows, length)
    index = torch.arange(rows)
    if document_BT1 is None:
        return Batch(tokens_BT1, place, index)
    document = document_BT1[:, :-1]
    new = torch.ones(rows, length, dtype=torch.bool)
    new[:, 1:] = document[:, 1:] != document[:, :-1]
    position = place - torch.where(new, place, 0).cummax(1).values
    starts = new.flatten().nonzero()[:, 0].int()
    cu_seqlens = torch.cat([starts, torch.full((4,), rows * length, dtype=torch.int32)])
    return Batch(tokens_BT1, position, index, document_BT1.int(), cu_seqlens)
