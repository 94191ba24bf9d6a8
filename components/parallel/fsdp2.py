"""Fully sharded data parallelism, FSDP-2 (PyTorch FSDP, arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`).

Units: each shared part, each block and each MTP depth; in each of them one nested fp32 unit for every module that
says `fp32_unit` (router, recurrence scalars), which bf16 would spoil, and one for every module that says `own_unit`
(experts that are wrapped one by one); and the root with the embedding, the final norm and the wires, so that input and
output embedding are gathered once. A looped block is one unit called several times. One rank uses the same code on a
group of one.

Left out on purpose: prefetch beyond FSDP-2's own, of which no gain has been measured.
"""

import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from components.models.stacked_lm import StackedLM
from components.parallel.plan import Plan, data_mesh, placement
from registry import register


def separate_experts(model: StackedLM) -> None:
    """Store every folded stack of experts as one module an expert (in a model without values), so that each becomes a
    unit. Logical names stay, so a checkpoint of one wrapping loads into the other."""
    for module in list(model.modules()):
        if hasattr(getattr(module, "experts", None), "separate"):
            module.experts = module.experts.separate()
    # An expert passes its input through, a view. What FSDP warns of are operations in place on it; there are none.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPExpert\) returned a view")


def exact_experts(model: StackedLM) -> None:
    """Let the routed experts compute in fp32, whatever the rest uses."""
    for module in model.modules():
        if getattr(module, "expert_unit", False):
            module.fp32_unit = True


@register("plan", "fsdp2")
@final
class FSDP2(Plan):
    """A unit a block: weights gathered for its forward and backward, gradients reduced after each micro-batch."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, parallelism, dtype: torch.dtype, device_type: str, world: int):
        p = self.parallelism = parallelism
        self.dtype = dtype
        self.mesh = data_mesh(device_type, world, p.data_parallel_shard_degree, p.data_parallel_replicate_degree)

    def shard(self, model: StackedLM, ignored: Collection[nn.Parameter] = ()) -> None:
        """Master weights stay in the dtype they have (fp32), compute is in the plan's, gradients travel in
        `reduce_dtype`; parts that say `fp32_unit` do all in fp32."""
        reduced = getattr(torch, self.parallelism.reduce_dtype)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=reduced)
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
        reshard = self.parallelism.reshard_after_forward

        def place(parameter: nn.Parameter) -> Shard:
            return placement(parameter, self.mesh.size(-1))

        how = {"mesh": self.mesh, "shard_placement_fn": place, "ignored_params": set(ignored)}
        for unit in _units(model):
            for module in _nested(unit):
                fp32 = getattr(module, "fp32_unit", False)
                fully_shard(module, mp_policy=exact if fp32 else policy, reshard_after_forward=reshard, **how)
                module.set_unshard_in_backward(getattr(module, "backward_needs_weights", True))
            fully_shard(unit, mp_policy=policy, reshard_after_forward=reshard, **how)
        fully_shard(model, mp_policy=policy, **how)
        for method in ("logits", "extend", "acceptance", "gradient_norms"):
            register_fsdp_forward_method(model, method)


def _units(model: StackedLM) -> Iterator[nn.Module]:
    yield from model.shared.values()
    yield from model.layers
    yield from model.mtp.depths if model.mtp is not None else ()


def _nested(unit: nn.Module) -> list[nn.Module]:
    """The modules in `unit` that are units by themselves, but for those of a shared part, which have been."""
    marked = (m for m in unit.modules() if getattr(m, "fp32_unit", False) or getattr(m, "own_unit", False))
    return [module for module in marked if not isinstance(module, FSDPModule)]
