"""Which tensors a checkpoint holds, and what they are called.

    model.<logical name>                weights, and buffers by module path (the routing bias and its average load)
    optimizer.<logical name>.<state>    momentum, second moments

Left out on purpose: what is no tensor (step, tokens, random states, recipe): `Checkpointer.save` takes it as JSON.
Non-persistent buffers are not state: they follow from the recipe.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from components.checkpoint.dcp import CheckpointError, Views
from components.parameters import LogicalView, local_view, logical_path, owned_parameters


@torch.no_grad()
def model_state(model: nn.Module) -> Views:
    """This rank's part of every weight and persistent buffer; buffers are taken to be equal on all ranks."""
    return _named((f"model.{view.name}", view) for view in (*_weights(model), *_buffers(model)))


def optimizer_state(states: Iterable[tuple[str, LogicalView]]) -> Views:
    """This rank's part of the optimizers' state, from pairs (state name, view of that state of a logical tensor)."""
    return _named((f"optimizer.{view.name}.{state}", view) for state, view in states)


def _weights(model: nn.Module) -> Iterator[LogicalView]:
    for owned in owned_parameters(model):
        for logical in owned.role.logical:
            view = local_view(owned.parameter, logical, owned.logical_name(logical))
            if view is not None:
                yield view


def _buffers(model: nn.Module) -> Iterator[LogicalView]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                full = logical_path(f"{path}.{name}" if path else name)
                yield LogicalView(full, tuple(buffer.shape), (0,) * buffer.ndim, buffer)


def _named(parts: Iterable[tuple[str, LogicalView]]) -> Views:
    views: Views = {}
    for name, view in parts:
        if name in views:
            raise CheckpointError(f"two tensors are called {name}; give each logical tensor a name of its own")
        views[name] = view
    return views
