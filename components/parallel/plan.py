"""What a parallelism plan is: where weights and gradients lie on the ranks between and within optimizer steps.

A plan is registered by name and chosen by `[parallelism] plan`. It sees a model on the meta device and gives it
parameters that the optimizers and checkpoints take (DTensors, sharded over the ranks); the loop tells it when weights
have changed and when gradients are complete. None of this changes what is computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from components.models.stacked_lm import StackedLM


class Plan(ABC):
    """One object a run. `whole` says that each rank holds all weights in one place during a step, which is what a
    recording of whole micro-batches needs."""

    whole: ClassVar[bool] = False

    @classmethod
    def obstacles(cls, parallelism) -> Iterator[tuple[str, str]]:
        """(key of [parallelism], why this plan cannot take its value)."""
        return iter(())

    @abstractmethod
    def shard(self, model: StackedLM, ignored: Collection[nn.Parameter] = ()) -> None:
        """Shard the parameters of `model`, which has no values yet, in place; `ignored` ones stay as they are."""

    def initialised(self, model: StackedLM) -> None:
        """The parameters have their initial values."""
        return None

    def clear_gradients(self) -> None:
        """Before a step's first micro-batch."""
        return None

    def reduce_gradients(self) -> None:
        """After a step's last micro-batch: every parameter's `.grad` is then the average over ranks of their sums."""
        return None

    def refresh_weights(self) -> None:
        """After parameters changed: what the forward reads is what they are."""
        return None


def data_mesh(device_type: str, world_size: int, shard_degree: int = -1, replicate_degree: int = 1) -> DeviceMesh:
    """One axis ("shard"), or two ("replicate", "shard") for hybrid sharding. A shard degree of −1 takes all the ranks
    that replication leaves."""
    if replicate_degree == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shard_degree = world_size // replicate_degree if shard_degree == -1 else shard_degree
    return init_device_mesh(device_type, (replicate_degree, shard_degree), mesh_dim_names=("replicate", "shard"))


def placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first axis, so that a rank holds whole experts and whole output rows; where a stack of experts is shorter
    than the ranks, an axis that divides evenly instead of empty shards."""
    if parameter.ndim == 3 and parameter.shape[0] < ranks:
        even = [axis for axis in (1, 2) if parameter.shape[axis] % ranks == 0]
        return Shard(even[0] if even else 0)
    return Shard(0)


def exact_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Those of modules that compute in fp32 whatever the rest uses."""
    units = (module for module in model.modules() if getattr(module, "fp32_unit", False))
    return {parameter for unit in units for parameter in unit.parameters()}


def compute_dtype(parameter: nn.Parameter, exact: set[nn.Parameter], dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if parameter in exact else dtype
