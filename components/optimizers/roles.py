"""Roles to optimizers: every parameter in exactly one group, and one object that steps them all.

The loop sees `JointOptimizer` only: clip, step at the schedule's factor, report. Five optimizers, one factor, so the
ratio of any two learning rates is the same at every step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from components.optimizers.base import Capture, RoleOptimizer, StateView, copies, local, ranks
from components.optimizers.distribution import LoadReport
from components.optimizers.stopwatch import Stopwatch
from components.parameters import ROLE_NAMES, OwnedParameter, master, owned_parameters
from registry import Component, lookup, unknown


@dataclass(frozen=True)
class RoleSummary:
    """A row of the table in the start banner."""

    role: str
    optimizer: str
    learning_rate: float  # peak
    tensors: int
    parameters: int


@dataclass(frozen=True)
class RoleGroup:
    """One role: its optimizer, as configured and as built."""

    component: Component
    optimizer: RoleOptimizer

    @property
    def parameters(self) -> tuple[OwnedParameter, ...]:
        return self.optimizer.parameters

    @property
    def elements(self) -> int:
        return sum(owned.parameter.numel() for owned in self.parameters)


@final
class JointOptimizer:
    """All roles' optimizers as one. `steps` counts the updates made; a checkpoint saves it and sets it again. Weights
    are values of `master_dtype` after every step, of whatever role, and state and arithmetic fp32."""

    def __init__(self, groups: Mapping[str, RoleGroup], master_dtype: torch.dtype = torch.float32):
        self.groups = dict(groups)
        self.master_dtype = master_dtype
        self.steps = 0
        self._update_rms: dict[str, Tensor] = {}
        self._stopwatch = Stopwatch(next(self._parameters()).device)

    def step(self, factor: float, measure: bool = False) -> None:
        """Update every role at its peak rate times `factor`. `measure` makes `update_rms` and `seconds` tell of it."""
        squares = {}
        with self._stopwatch.running(measure):
            for role, group in self.groups.items():
                squares[role] = group.optimizer.step(group.component.config.lr * factor, self.steps, measure)
            self.round_weights()
        self.steps += 1
        if measure:
            self._update_rms = self._root_mean(squares)

    def record(self, capture: Capture) -> None:
        """Let every role's optimizer record what it can, as CUDA graphs by `capture`, right after construction.
        Whatever the capture raises."""
        for group in self.groups.values():
            group.optimizer.record(capture)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Every trained weight to the nearest value of `master_dtype`; also for weights that an optimizer did not make:
        initial and loaded ones."""
        if self.master_dtype == torch.float32:
            return
        for group in self.groups.values():
            for weight in group.optimizer.weights():
                weight.copy_(weight.to(self.master_dtype))

    def zero_grad(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def learning_rates(self, factor: float) -> dict[str, float]:
        """Each role's rate at the schedule's `factor`."""
        return {role: group.component.config.lr * factor for role, group in self.groups.items()}

    def update_rms(self) -> dict[str, Tensor]:
        """RMS of the update by role (learning rate in, weight decay out, before the weights are rounded) at the last
        step that was measured."""
        return self._update_rms

    def seconds(self) -> dict[str, float]:
        """What the measured steps since the last call took on this rank: `optimizer` all in all, `orthogonalising`
        without the exchange, in which ranks wait for each other. Waits for the device."""
        watches = (getattr(group.optimizer, "orthogonalising", None) for group in self.groups.values())
        alone = sum(watch.seconds() for watch in watches if watch is not None)
        return {"optimizer": self._stopwatch.seconds(), "orthogonalising": alone}

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

        The norm is fp32, 0-d, on the device, over every shard of every mesh; the host does not wait for it.
        """
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        norm = total_norm(gradients)
        if gradients:
            torch._foreach_mul_([local(g) for g in gradients], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_views(self) -> Iterator[StateView]:
        """(state name, view) for this rank's part of every piece of state; a copy into `view.local` loads it.

        exp_avg, exp_avg_sq, momentum: shape of the logical tensor. row_second_moment: (output neurons,), on the owner
        of the matrix only. Names and contents depend on no number of ranks, sharding or folding; replicas hold the
        same part. `steps` is the rest of the state.
        """
        for group in self.groups.values():
            yield from group.optimizer.state_views()

    def role_table(self) -> list[RoleSummary]:
        """What the banner prints."""
        return [
            RoleSummary(role, g.component.name, g.component.config.lr, len(g.parameters), g.elements)
            for role, g in self.groups.items()
        ]

    def load_reports(self) -> dict[str, LoadReport]:
        """How evenly the ranks share the orthogonalising, for each role that is orthogonalised."""
        loads = {role: getattr(group.optimizer, "load", None) for role, group in self.groups.items()}
        return {role: load for role, load in loads.items() if load is not None}

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (owned.parameter for group in self.groups.values() for owned in group.parameters)

    def _root_mean(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        sums = torch.stack(list(squares.values()))
        if ranks() > 1:
            dist.all_reduce(sums)
        return {role: (s / g.elements).sqrt() for (role, g), s in zip(self.groups.items(), sums, strict=True)}


def build_optimizers(
    model: nn.Module, configs: Mapping[str, Component | None], master_dtype: torch.dtype = torch.float32
) -> JointOptimizer:
    """The joint optimizer of a (sharded, materialised) model, from one configured optimizer a role.

    A role without parameters needs none. Raises ValueError for a parameter outside or in two roles, a role that has
    parameters but no optimizer, and an optimizer that cannot serve its role.
    """
    for role in configs:
        if role not in ROLE_NAMES:
            raise ValueError(f"[optimizer]: {unknown('role', role, ROLE_NAMES)}")
    groups = {}
    for role, parameters in parameters_by_role(model).items():
        component = configs.get(role)
        if component is None:
            raise ValueError(
                f"[optimizer.{role}]: the model has {len(parameters)} parameters of this role (the first is "
                f"{parameters[0].name}) but the recipe gives it no optimizer; add this table"
            )
        allowed = lookup("optimizer", component.name).cls.roles
        if role not in allowed:
            raise ValueError(
                f"[optimizer.{role}]: {component.name} serves the roles {', '.join(allowed)} only; use adamw here"
            )
        groups[role] = RoleGroup(component, component.build(parameters=parameters))
    return JointOptimizer(groups, master_dtype)


def parameters_by_role(model: nn.Module) -> dict[str, list[OwnedParameter]]:
    """The model's trainable parameters by role, in the roles' order, complete and disjoint or ValueError."""
    owned = list(owned_parameters(model))
    _check_roles(model, owned)
    trained = [o for o in owned if o.parameter.requires_grad]
    order = sorted(trained, key=lambda o: ROLE_NAMES.index(o.role.name))
    return {role: list(members) for role, members in groupby(order, key=lambda o: o.role.name)}


def _check_roles(model: nn.Module, owned: list[OwnedParameter]) -> None:
    """`owned_parameters` has refused undeclared parameters. Here: roles, shared parameters, and the logical tensors."""
    for o in owned:
        if o.role.name not in ROLE_NAMES:
            raise ValueError(f"{o.name}: {unknown('role', o.role.name, ROLE_NAMES)}")
    role_of = {id(o.parameter): o for o in owned}
    for path, module in model.named_modules():
        for name, role in module.roles().items() if hasattr(module, "roles") else ():
            first = role_of[id(master(getattr(module, name)))]
            if role.name != first.role.name:
                raise ValueError(
                    f"{first.name} is shared with {path}.{name} but declared {first.role.name!r} here and "
                    f"{role.name!r} there; a shared parameter has one role"
                )
    for o in owned:
        shape = tuple(o.parameter.shape)
        covered = sum(prod(logical.shape(shape)) for logical in o.role.logical)
        if covered != o.parameter.numel():
            raise ValueError(
                f"{o.name} has {o.parameter.numel()} values but its logical tensors have {covered}; they must cover "
                "it exactly once"
            )


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together (fp32, 0-d, same on every rank), plain tensors and DTensors of any mesh.

    From the local shards: squares add up over ranks, each divided by the number of ranks that hold it.
    """
    if not gradients:
        return torch.zeros(())
    by_placement: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        by_placement.setdefault(key, []).append(gradient)
    square = sum(_square(members) / copies(members[0]) for members in by_placement.values())
    if ranks() > 1:
        dist.all_reduce(square)
    return square.sqrt()


def _square(gradients: list[Tensor]) -> Tensor:
    """The sum of squares of this rank's shards, fp32."""
    norms = torch._foreach_norm([local(gradient) for gradient in gradients])
    return torch.stack(norms).float().square().sum()
