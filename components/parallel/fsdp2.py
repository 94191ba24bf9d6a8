"""Fully sharded data parallelism, FSDP-2 (PyTorch FSDP, arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`).

Units: each shared part, each block and each MTP depth; in each of them one nested fp32 unit for every module that
says `fp32_unit` (router, recurrence scalars), which bf16 would spoil; and the root with the embedding, the final norm
and the wires, so that input and output embedding are gathered once. A looped block is one unit called several times.
One rank uses the same code on a group of one.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from components.models.stacked_lm import StackedLM


def data_mesh(device_type: str, world_size: int, shard_degree: int, replicate_degree: int) -> DeviceMesh:
    """One axis ("shard"), or two ("replicate", "shard") for hybrid sharding. A shard degree of −1 takes all the ranks
    that replication leaves."""
    if replicate_degree == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shard_degree = world_size // replicate_degree if shard_degree == -1 else shard_degree
    return init_device_mesh(device_type, (replicate_degree, shard_degree), mesh_dim_names=("replicate", "shard"))


def apply_fsdp2(
    model: StackedLM, mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard `model` in place over the last axis of `mesh`. Master weights stay in the dtype they have (fp32), compute
    is in `param_dtype`, gradients travel in `reduce_dtype`."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def place(parameter: nn.Parameter) -> Shard:
        return _placement(parameter, mesh.size(-1))

    for unit in _units(model):
        for module in unit.modules():
            if getattr(module, "fp32_unit", False) and not isinstance(module, FSDPModule):  # shared: done already
                fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard_after_forward)
        fully_shard(
            unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, shard_placement_fn=place
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for method in ("logits", "extend", "acceptance", "gradient_norms"):
        register_fsdp_forward_method(model, method)


def _units(model: StackedLM) -> Iterator[nn.Module]:
    yield from model.shared.values()
    yield from model.layers
    yield from model.mtp.depths if model.mtp is not None else ()


def _placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first axis, so that a rank holds whole experts and whole output rows; where a stack of experts is shorter
    than the ranks, an axis that divides evenly instead of empty shards."""
    if parameter.ndim == 3 and parameter.shape[0] < ranks:
        even = [axis for axis in (1, 2) if parameter.shape[axis] % ranks == 0]
        return Shard(even[0] if even else 0)
    return Shard(0)
