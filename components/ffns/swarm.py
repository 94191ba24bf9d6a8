"""A pool of SwiGLU experts that several layers can share, each with a router and a routing bias of its own (Auron,
part II).

Softmax routing: with `bias_in = "logits"`, p = softmax(x W_r + bias), as the document writes it; with "selection",
p = softmax(x W_r) and the bias acts on the choice only, as in DeepSeek-V3. Weights are the chosen p, normalised to
sum 1. Balance: bias += speed · sign(mean − count) once an optimizer step; or, as the ablation, the auxiliary loss of
Switch Transformer (Fedus et al., arXiv 2101.03961, eq. 4).

Whether the pool is shared is not said here but in the stack (`share` of a zone or the model): each layer then has
this module, and all have one `pool`. Shapes: B batch, T sequence, N = B*T tokens, D width, E experts, K choices.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from components.ffns.deepseek_moe import Experts, ExpertsConfig, Router, choice_counts, choose
from components.interfaces import BALANCE_LOSS, Aux, Context
from components.layers.initial import residual_std
from registry import register

ALIGNMENT = 16  # of an expert's width, which grouped products want


class Pool(nn.Module):
    """The experts, without a router."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.experts = experts

    def forward(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, counts_E: Tensor) -> Tensor:
        return self.experts(x_ND, expert_NK, weight_NK, counts_E)


@register("ffn", "swarm", example={"experts": 4, "top_k": 2, "hidden": 16})
class Swarm(nn.Module):
    """Top-k softmax routing into a pool of SwiGLU experts, which layers may share."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertsConfig):
        experts: int  # experts E of the pool
        top_k: int = 2  # experts a token passes through in each layer
        hidden: int  # width of each expert; rounded down to a multiple of 16
        bias_in: Literal["logits", "selection"] = "logits"  # where the routing bias acts: weights too, or choice only
        balance: Literal["bias", "loss"] = "bias"  # by moving the bias, or by an auxiliary loss
        bias_speed: float = 0.001  # step of the routing bias
        loss_weight: float = 0.01  # of the auxiliary loss, beside a loss in nats per token
        expert_role: Literal["expert", "matrix"] = "expert"  # which optimizer trains the experts, one by one

        def __post_init__(self):
            if not 1 <= self.top_k <= self.experts:
                raise ValueError(f"top_k = {self.top_k} must be between 1 and experts = {self.experts}")
            if self.width < 1:
                raise ValueError(f"hidden = {self.hidden} must be at least {ALIGNMENT}")
            if self.loss_weight < 0:
                raise ValueError(f"loss_weight = {self.loss_weight} must not be negative")

        @property
        def width(self) -> int:
            return self.hidden // ALIGNMENT * ALIGNMENT

        def _expert(self, dim: int) -> int:
            return 3 * dim * self.width

        def parameters(self, dim: int) -> int:
            return self.experts * self._expert(dim) + self.experts * dim

        def active_parameters(self, dim: int) -> int:
            return self.top_k * self._expert(dim) + self.experts * dim

        def pool_parameters(self, dim: int, passes: int) -> tuple[int, int]:
            """Stored and active parameters of a shared pool that a token passes `passes` times. It chooses anew each
            time, so it meets up to top_k experts each time."""
            return self.experts * self._expert(dim), min(self.experts, passes * self.top_k) * self._expert(dim)

    def __init__(self, config: Config, *, dim: int, branches: int, pool: Pool | None = None):
        super().__init__()
        c = self.config = config
        self.router = Router(dim, c.experts)
        experts = (dim, c.experts, c.width, residual_std(branches), c.expert_role)
        self.pool = Pool(Experts(*experts)) if pool is None else pool
        self.register_buffer("bias_E", torch.zeros(c.experts))

    def forward(self, x_BTD: Tensor, ctx: Context) -> tuple[Tensor, Aux]:
        c, x_ND = self.config, x_BTD.flatten(0, 1)
        logits_NE = self.router(x_ND)
        p_NE = (logits_NE + self.bias_E if c.bias_in == "logits" else logits_NE).softmax(-1)
        ranked_NE = p_NE.detach() + self.bias_E if c.bias_in == "selection" else p_NE.detach()
        expert_NK = choose(ranked_NE, c.top_k)
        weight_NK = p_NE.gather(-1, expert_NK)
        weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        counts_E = choice_counts(expert_NK, c.experts)
        y_BTD = self.pool(x_ND, expert_NK, weight_NK, counts_E).view_as(x_BTD)
        aux = {"counts": counts_E}
        return y_BTD, aux | ({BALANCE_LOSS: self._balance_loss(p_NE, counts_E)} if c.balance == "loss" else {})

    def _balance_loss(self, p_NE: Tensor, counts_E: Tensor) -> Tensor:
        """weight · E Σ_e (share of the choices that fall on e) · (mean probability of e); 0-d, least at even load."""
        share_E = counts_E / counts_E.sum()
        return self.config.loss_weight * self.config.experts * (share_E * p_NE.mean(0)).sum()

    @torch.no_grad()
    def update_balance(self, counts_E: Tensor) -> None:
        """Move the bias one step towards even load. `counts_E` are one optimizer step's choices of this layer, over
        all micro-batches and ranks. In place, so that checkpoints and captured graphs see the change."""
        if self.config.balance == "bias":
            counts_E = counts_E.to(self.bias_E.dtype)
            self.bias_E.add_((counts_E.mean() - counts_E).sign(), alpha=self.config.bias_speed)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        self.bias_E.zero_()
