"""AdamW on local shards: torch's own update, fused on CUDA, over state of ours.

Element by element, so sharding changes nothing and each rank works on its own storage only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from components.optimizers.base import RoleOptimizer, StateView, copies, local
from components.parameters import OwnedParameter
from registry import register


@register("optimizer", "adamw", example={"lr": 3e-4})
@final
class AdamW(RoleOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        lr: float  # peak learning rate
        betas: tuple[float, float] = (0.9, 0.95)  # decay of the first and second moment
        eps: float = 1e-8  # added to the root of the second moment
        weight_decay: float = 0.0  # decoupled: lr * weight_decay of the weight a step

        def __post_init__(self):
            if not all(0 <= beta < 1 for beta in self.betas):
                raise ValueError(f"betas must lie in [0, 1), not {list(self.betas)}")
            if self.lr < 0 or self.eps <= 0 or self.weight_decay < 0:
                raise ValueError("lr and weight_decay must be 0 or more and eps more than 0")

    def __init__(self, config: Config, *, parameters: Sequence[OwnedParameter]):
        super().__init__(parameters)
        self.config = config
        self.exp_avg = self.zeros()
        self.exp_avg_sq = self.zeros()
        # One count a parameter is what torch's update wants; they are equal, and set anew at every step.
        self._steps_N = torch.zeros(len(self.parameters), device=self.exp_avg[0].device)
        self._step_of_each = list(self._steps_N.unbind())

    @torch.no_grad()
    def step(self, lr: float, steps: int, measure: bool) -> Tensor | None:
        c, weights = self.config, self.weights()
        self._steps_N.fill_(steps)
        adamw(
            weights,
            self.gradients(),
            [local(m) for m in self.exp_avg],
            [local(v) for v in self.exp_avg_sq],
            [],
            self._step_of_each,
            fused=weights[0].is_cuda,
            foreach=False,
            amsgrad=False,
            maximize=False,
            beta1=c.betas[0],
            beta2=c.betas[1],
            lr=lr,
            weight_decay=c.weight_decay,
            eps=c.eps,
        )
        return self._squared_update(lr, steps + 1) if measure else None

    def state_views(self) -> Iterator[StateView]:
        yield from self.sharded_views("exp_avg", self.exp_avg)
        yield from self.sharded_views("exp_avg_sq", self.exp_avg_sq)

    def _squared_update(self, lr: float, steps: int) -> Tensor:
        """The update follows from the state after the step, so nothing is kept and one parameter's room is enough."""
        correction1, correction2 = (1 - beta**steps for beta in self.config.betas)
        total = torch.zeros((), device=self._steps_N.device)
        for owned, exp_avg, exp_avg_sq in zip(self.parameters, self.exp_avg, self.exp_avg_sq, strict=True):
            root = local(exp_avg_sq).div(correction2).sqrt_().add_(self.config.eps)
            update = local(exp_avg).div(root).mul_(lr / correction1)
            total += update.square_().sum() / copies(owned.parameter)
        return total
