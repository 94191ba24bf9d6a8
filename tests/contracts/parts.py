"""Building registered parts from their examples, as every contract does."""

import torch
from torch import nn

import registry
from components.interfaces import Context
from components.parameters import initialise, owned_parameters

DIM = 32


def names(kind: str) -> list[str]:
    registry.discover()
    return registry.names(kind)


def config(kind: str, name: str):
    return registry.parse_component(kind, {"name": name, **registry.lookup(kind, name).example})


def built(kind: str, name: str, seed: int = 0, **facts) -> nn.Module:
    """The example of a registered part, initialised in float64 by way of the meta device."""
    with torch.device("meta"):
        part = config(kind, name).build(**facts)
    part.to_empty(device="cpu")
    initialise(part, seed)
    for module in part.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
    return part.double()


def context(rows: int, length: int, document_BT: torch.Tensor | None = None) -> Context:
    """One document a row, or documents numbered by `document_BT`."""
    place = torch.arange(length).expand(rows, length)
    if document_BT is None:
        return Context(place)
    new = torch.ones(rows, length, dtype=torch.bool)
    new[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    starts = new.flatten().nonzero()[:, 0].int()
    padding = torch.full((3,), rows * length, dtype=torch.int32)
    position_BT = place - torch.where(new, place, 0).cummax(1).values
    return Context(position_BT, document_BT.int(), torch.cat([starts, padding]))


def assert_parameters_counted_declared_and_trained(part: nn.Module, formula: int) -> None:
    """The formula's count is the module's, every parameter has one role, logical tensors tile the stored ones, and
    every parameter has a gradient that is not all zero."""
    assert sum(p.numel() for p in part.parameters()) == formula
    for owned in owned_parameters(part):
        shape = owned.parameter.shape
        sizes = [torch.Size(b - a for a, b in logical.ranges(tuple(shape))).numel() for logical in owned.role.logical]
        assert sum(sizes) == shape.numel(), owned.name
        assert owned.parameter.grad is not None and owned.parameter.grad.any(), f"no gradient reaches {owned.name}"
