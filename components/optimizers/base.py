"""What every optimizer of a role is: the abstract class, and how it looks at sharded parameters.

Left out on purpose: `torch.optim.Optimizer` with its groups and lazily made state. One object serves one role, its
state is there from the start (so loading is a copy in place and a resumed run is the unbroken one bit for bit), and
the only count of updates is the joint optimizer's.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from components.parameters import ROLE_NAMES, LogicalView, OwnedParameter, local_view

StateView = tuple[str, LogicalView]  # state name, this rank's part of that state of one logical tensor
Capture = Callable[[Sequence[Callable[[], None]]], list[Callable[[], None]]]  # of functions: what replays each of them


class RoleOptimizer(ABC):
    """Updates every parameter of one role. `roles` names those it may serve."""

    roles: ClassVar[tuple[str, ...]] = ROLE_NAMES

    def __init__(self, parameters: Sequence[OwnedParameter]):
        self.parameters = tuple(parameters)
        for owned in self.parameters:
            if owned.parameter.is_meta:
                raise ValueError(f"{owned.name} is on the meta device; materialise the model before its optimizers")

    @abstractmethod
    def step(self, lr: float, steps: int, measure: bool) -> Tensor | None:
        """Update the parameters in place from their gradients, at rate `lr`, after `steps` earlier updates.

        A parameter without a gradient takes part with a zero gradient. Returns, where `measure` is set, this rank's
        share of the squared norm of the update (weight decay left out): the shares of all ranks add up to it.
        """

    @abstractmethod
    def state_views(self) -> Iterator[StateView]:
        """This rank's part of the state, logical tensor by logical tensor, as views: a copy into them loads it."""

    def record(self, capture: Capture) -> None:
        """Replay what `capture` makes of a step from here on, where an optimizer has something to gain by it. Before
        the first step, and before state is loaded."""
        return None

    def weights(self) -> list[Tensor]:
        """The local storage of every parameter."""
        return [local(owned.parameter).detach() for owned in self.parameters]

    def gradients(self) -> list[Tensor]:
        """The local gradients, zeros where there are none."""
        return [
            torch.zeros_like(local(p).detach()) if p.grad is None else local(p.grad)
            for p in (owned.parameter for owned in self.parameters)
        ]

    def zeros(self) -> list[Tensor]:
        """Fresh state: a zero for every value of every parameter, sharded as the parameter is."""
        return [torch.zeros_like(owned.parameter, requires_grad=False) for owned in self.parameters]

    def sharded_views(self, name: str, state: Sequence[Tensor]) -> Iterator[StateView]:
        """The views of state that has the shape and the sharding of the parameters."""
        for owned, stored in zip(self.parameters, state, strict=True):
            for logical in owned.role.logical:
                view = local_view(stored, logical, owned.logical_name(logical))
                if view is not None:
                    yield name, view


def local(tensor: Tensor) -> Tensor:
    """This rank's storage of a plain tensor or a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def copies(parameter: Tensor) -> int:
    """How many ranks hold each value of `parameter`: all of them for a plain tensor, the replicas under HSDP."""
    if not isinstance(parameter, DTensor):
        return ranks()
    mesh = parameter.device_mesh
    return ranks() // math.prod(mesh.size(d) for d, p in enumerate(parameter.placements) if p.is_shard())
