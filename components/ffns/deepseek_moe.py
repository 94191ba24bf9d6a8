"""Mixture of SwiGLU experts with shared experts and balance without an auxiliary loss.

Routing as DeepSeek-V3 (arXiv 2412.19437, eq. 12-16): sigmoid scores, a bias that acts on the selection only, weights
from the scores of the selected; balance by moving the bias (Wang et al., arXiv 2408.15664) from an average of the
load. Shapes: B batch, T sequence, N = B*T tokens, D width, E experts, K choices a token, F hidden.

The forward has no side effects: counts leave as `Aux`, and `update_balance` is called once an optimizer step by the
training loop, with counts summed over micro-batches and ranks. So checkpointing, validation and generation cannot
count a token that was not trained. The loader makes no padding, so every token of a batch counts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.ffns.swiglu import ROW_MULTIPLE, SwiGLU
from components.interfaces import Aux, Context
from components.kernels.grouped_gemm.op import mixture_of_swiglu
from components.kernels.router_product.op import router_product
from components.layers.initial import LINEAR_STD, residual_std
from components.parameters import Logical, Role, RoleName, normal, whole
from registry import register

ROUTER_STD = 0.006


class Router(nn.Module):
    """Logits of every expert, in fp32: near-ties between experts must not be decided by rounding."""

    fp32_unit = True  # sharded and computed in fp32 whatever the rest of the block uses; an FFN may take that back

    def __init__(self, dim: int, experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))

    def roles(self) -> dict[str, Role]:
        return {"weight": whole("router", "weight", normal(ROUTER_STD))}

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            return router_product(x_ND, self.weight)
        return F.linear(x_ND.to(self.weight.dtype), self.weight)


def choose(score_NE: Tensor, choices: int) -> Tensor:
    """The experts of the highest scores, highest first and the first of equals, int64 (N, K). One after another: a
    compiler makes that one pass, where `topk` takes 46 us for 2 of 16 experts and 16,384 tokens on an H200."""
    number_E = torch.arange(score_NE.shape[-1], device=score_NE.device)
    chosen = []
    for _ in range(choices):
        chosen.append(score_NE.argmax(-1))
        score_NE = score_NE.masked_fill(chosen[-1][:, None] == number_E, -torch.inf)
    return torch.stack(chosen, -1)


def choice_counts(expert_NK: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen, int64 (E,). A sum over comparisons, which adds nothing atomically."""
    number_E = torch.arange(experts, device=expert_NK.device)
    return (expert_NK.flatten()[:, None] == number_E).sum(0)


class Experts(nn.Module):
    """The routed experts' weights, folded: w13_EDF holds gate and up side by side, w2_EFD the way back."""

    expert_unit = True  # a plan may keep its products in fp32

    def __init__(self, dim: int, experts: int, hidden: int, out_std: float, role: RoleName = "expert"):
        super().__init__()
        self.experts, self.hidden, self.out_std, self.role = experts, hidden, out_std, role
        self.w13_EDF = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.w2_EFD = nn.Parameter(torch.empty(experts, hidden, dim))

    def roles(self) -> dict[str, Role]:
        w13, w2, f = [], [], self.hidden
        for e in range(self.experts):
            w13.append(Logical(f"{e}.w1", normal(LINEAR_STD), (e, (0, self.w13_EDF.shape[1]), (0, f))))
            w13.append(Logical(f"{e}.w3", normal(LINEAR_STD), (e, (0, self.w13_EDF.shape[1]), (f, 2 * f))))
            w2.append(Logical(f"{e}.w2", normal(self.out_std), (e,)))
        return {
            "w13_EDF": Role(self.role, tuple(w13), transposed=True),
            "w2_EFD": Role(self.role, tuple(w2), transposed=True),
        }

    def separate(self) -> "SeparateExperts":
        """The same experts, stored one by one; without values, for a model that is still to be initialised."""
        device = self.w13_EDF.device
        with device:
            return SeparateExperts(self.w13_EDF.shape[1], self.experts, self.hidden, self.out_std, self.role)

    def forward(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, counts_E: Tensor) -> Tensor:
        return _mixture(x_ND, self.w13_EDF, self.w2_EFD, expert_NK, weight_NK, counts_E)


class Expert(nn.Module):
    """One routed expert's weights, under the logical names that they have when folded.

    `x` passes through, so that a sharding unit of its own knows from x's gradient that the expert's gradients are
    complete, and reduces them then instead of at the end of backward. The weights come out as copies: what a unit
    gathered is freed when its forward ends.
    """

    own_unit = True  # sharded by itself
    expert_unit = True
    backward_needs_weights = False  # the gradient of a copy

    def __init__(self, dim: int, hidden: int, out_std: float, role: RoleName = "expert"):
        super().__init__()
        self.hidden, self.out_std, self.role = hidden, out_std, role
        self.w13_DF = nn.Parameter(torch.empty(dim, 2 * hidden))
        self.w2_FD = nn.Parameter(torch.empty(hidden, dim))

    def roles(self) -> dict[str, Role]:
        dim, f = self.w13_DF.shape[0], self.hidden
        halves = (("w1", (0, f)), ("w3", (f, 2 * f)))
        w13 = tuple(Logical(name, normal(LINEAR_STD), ((0, dim), columns)) for name, columns in halves)
        w2 = (Logical("w2", normal(self.out_std)),)
        return {"w13_DF": Role(self.role, w13, transposed=True), "w2_FD": Role(self.role, w2, transposed=True)}

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x_ND, self.w13_DF.clone(), self.w2_FD.clone()


class SeparateExperts(nn.ModuleList):
    """The routed experts one by one, stacked for each forward: the same grouped products, at the price of the copies
    and of a layer's whole experts held for backward."""

    def __init__(self, dim: int, experts: int, hidden: int, out_std: float, role: RoleName = "expert"):
        super().__init__(Expert(dim, hidden, out_std, role) for _ in range(experts))

    def forward(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, counts_E: Tensor) -> Tensor:
        w13, w2 = [], []
        for expert in self:
            x_ND, w13_DF, w2_FD = expert(x_ND)
            w13.append(w13_DF)
            w2.append(w2_FD)
        return _mixture(x_ND, torch.stack(w13), torch.stack(w2), expert_NK, weight_NK, counts_E)


def _mixture(x_ND: Tensor, w13_EDF: Tensor, w2_EFD: Tensor, *routing: Tensor) -> Tensor:
    """The mixture in the weights' dtype, which a plan may keep at fp32, back in that of `x`."""
    return mixture_of_swiglu(x_ND.to(w13_EDF.dtype), w13_EDF, w2_EFD, *routing).to(x_ND.dtype)


class ExpertsConfig(ABC):
    """What routed experts cost, and where their grouped products work."""

    @abstractmethod
    def active_parameters(self, dim: int) -> int:
        """Those that a token passes, the router's included."""

    def flops(self, dim: int, seq_len: int) -> dict[str, float]:
        return {"matmul": 2.0 * self.active_parameters(dim)}

    def check(self, dim: int) -> str | None:
        """Why these experts cannot work at width `dim`, or None."""
        if dim % ROW_MULTIPLE:
            return f"dim = {dim} must be a multiple of {ROW_MULTIPLE} for grouped products"
        return None


@register("ffn", "deepseek_moe", example={"experts": 4, "shared": 1, "top_k": 2, "hidden": 16})
class DeepSeekMoE(nn.Module):
    """Top-k routed and shared SwiGLU experts; load balanced by a selection bias instead of an auxiliary loss."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertsConfig):
        experts: int  # routed experts E
        shared: int = 1  # experts that every token passes through
        top_k: int = 2  # routed experts a token passes through
        hidden: int  # width F of each expert
        route_scale: float = 1.0  # factor on the normalised weights
        capacity_factor: float = 0.0  # over the mean load a training micro-batch may send one expert; 0 is dropless
        bias_speed: float = 0.001  # step of the selection bias
        ema: float = 0.02  # share of the newest counts in the average load; 1 uses each step's alone
        tolerance: float = 0.05  # distance from the mean load that moves no bias
        exact_router: bool = True  # the router's product in fp32, whatever the rest uses

        def __post_init__(self):
            if not 1 <= self.top_k <= self.experts:
                raise ValueError(f"top_k = {self.top_k} must be between 1 and experts = {self.experts}")
            if self.hidden < 1 or self.hidden % ROW_MULTIPLE:
                raise ValueError(f"hidden = {self.hidden} must be a multiple of {ROW_MULTIPLE} for grouped products")
            if self.shared < 0 or self.capacity_factor < 0:
                raise ValueError("shared and capacity_factor must not be negative")
            if not 0 < self.ema <= 1:
                raise ValueError(f"ema = {self.ema} must be above 0 and at most 1")

        def _expert(self, dim: int) -> int:
            return 3 * dim * self.hidden

        def parameters(self, dim: int) -> int:
            return (self.experts + self.shared) * self._expert(dim) + self.experts * dim

        def active_parameters(self, dim: int) -> int:
            return (self.top_k + self.shared) * self._expert(dim) + self.experts * dim

    def __init__(self, config: Config, *, dim: int, branches: int):
        super().__init__()
        self.config = config
        self.router = Router(dim, config.experts)
        self.router.fp32_unit = config.exact_router
        self.experts = Experts(dim, config.experts, config.hidden, residual_std(branches))
        shared = SwiGLU.Config(hidden=config.shared * config.hidden) if config.shared else None
        self.shared = SwiGLU(shared, dim=dim, branches=branches, role="expert") if shared else None
        self.register_buffer("bias_E", torch.zeros(config.experts))
        self.register_buffer("load_E", torch.zeros(config.experts))  # the average load

    def forward(self, x_BTD: Tensor, ctx: Context) -> tuple[Tensor, Aux]:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = self.router(x_ND)
        scores_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32)).sigmoid()
        expert_NK = choose(scores_NE.detach() + self.bias_E, self.config.top_k)
        counts_E = choice_counts(expert_NK, self.config.experts)
        weight_NK = scores_NE.gather(-1, expert_NK)
        weight_NK = self.config.route_scale * weight_NK / weight_NK.sum(-1, keepdim=True)
        if self.config.capacity_factor and self.training:
            weight_NK = weight_NK * self._within_capacity(expert_NK)
        y_BTD = self.experts(x_ND, expert_NK, weight_NK, counts_E).view_as(x_BTD)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD, ctx)[0]
        return y_BTD, {"counts": counts_E}

    def _within_capacity(self, expert_NK: Tensor) -> Tensor:
        """1 where a choice is among the first `capacity` of its expert in batch order, else 0."""
        capacity = int(self.config.capacity_factor * expert_NK.numel() / self.config.experts)
        chosen = F.one_hot(expert_NK.flatten(), self.config.experts)
        place = chosen.cumsum(0).gather(1, expert_NK.flatten()[:, None])
        return (place <= capacity).view_as(expert_NK)

    @torch.no_grad()
    def update_balance(self, counts_E: Tensor) -> None:
        """Move the bias one step against the average load. `counts_E` are one optimizer step's choices, over all
        micro-batches and ranks. In place, so that checkpoints and captured graphs see the change."""
        c = self.config
        self.load_E.lerp_(counts_E.to(self.load_E.dtype), c.ema)
        mean = self.load_E.mean()
        over, under = self.load_E > (1 + c.tolerance) * mean, self.load_E < (1 - c.tolerance) * mean
        self.bias_E.add_(under.to(self.bias_E.dtype) - over.to(self.bias_E.dtype), alpha=c.bias_speed)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        self.bias_E.zero_()
        self.load_E.zero_()
