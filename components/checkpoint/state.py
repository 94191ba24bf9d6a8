"""Which tensors a checkpoint holds, and what they are called.

    model.<logical name>                weights, and buffers by module path (the routing bias and its EMA)
    optimizer.<logical name>.<state>    momentum, second moments, step counts

Left out on purpose: values that are no tensors (step, tokens, random states, recipe): `Checkpointer.save` takes them as
JSON. Non-persistent buffers are not state: they follow from the recipe.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from components.checkpoint.dcp import CheckpointError, Views
from components.parameters import LogicalView, OwnedParameter, local_view, logical_path, owned_parameters

MODEL, OPTIMIZER = "model", "optimizer"

ShapedState = tuple[OwnedParameter, str, Tensor]  # state shaped as its parameter, or reduced to size 1 on some axes
WholeState = tuple[str, str, Tensor]  # (full logical name, state name, the whole logical state), on its owner rank only


def model_state(model: nn.Module) -> Views:
    """This rank's part of every weight and persistent buffer; buffers are taken to be equal on all ranks."""
    weights = (view for owned in owned_parameters(model) for view in _split(owned, owned.parameter))
    buffers = (_whole(name, buffer) for name, buffer in _persistent_buffers(model))
    return _named(MODEL, [(view.name, view) for view in (*weights, *buffers)])


def optimizer_state(shaped: Iterable[ShapedState], whole: Iterable[WholeState] = ()) -> Views:
    """This rank's part of the optimizer's state, by logical name.

    `shaped` is cut into logical tensors as its parameter is. `whole` is state that one rank keeps for a logical matrix
    it owns, or scalars that every rank keeps (equal everywhere).
    """
    parts = [(f"{view.name}.{name}", view) for owned, name, tensor in shaped for view in _split(owned, tensor)]
    parts += [(f"{logical}.{name}", _whole(logical, tensor)) for logical, name, tensor in whole]
    return _named(OPTIMIZER, parts)


@torch.no_grad()
def _split(owned: OwnedParameter, stored: Tensor) -> list[LogicalView]:
    views = (local_view(stored, logical, owned.logical_name(logical)) for logical in owned.role.logical)
    return [view for view in views if view is not None]


def _whole(name: str, tensor: Tensor) -> LogicalView:
    return LogicalView(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield logical_path(f"{path}.{name}" if path else name), buffer


def _named(prefix: str, parts: Iterable[tuple[str, LogicalView]]) -> Views:
    views: Views = {}
    for name, view in parts:
        if f"{prefix}.{name}" in views:
            raise CheckpointError(f"two tensors are called {prefix}.{name}; give each logical tensor its own name")
        views[f"{prefix}.{name}"] = view
    return views
