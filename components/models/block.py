"""One layer: x ← r_a x + mixer(norm(x) + id); then, where there is an FFN, x ← r_m x + ffn(norm(x)).

The factors r are 1 unless they are learned, the id is 0 unless a wire gives one. Shapes: B batch, T sequence, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from components.interfaces import Aux, Cache, Context
from components.parameters import Role, constant, rows


class Block(nn.Module):
    """`recompute`, set by the parallel plan, says what drops its activations and runs again in the backward pass:
    options of `torch.utils.checkpoint` for "block" (all of it), "mixer" or "ffn"."""

    def __init__(self, norm: Callable[[], nn.Module], mixer: nn.Module, ffn: nn.Module | None, residual: float):
        """`residual`: initial value of learned factors on the residual stream; 0 for none."""
        super().__init__()
        self.mixer_norm, self.mixer = norm(), mixer
        self.ffn_norm, self.ffn = (None, None) if ffn is None else (norm(), ffn)
        self.initial = residual
        self.residual = nn.Parameter(torch.empty(1 if ffn is None else 2)) if residual else None
        self.recompute: dict[str, dict[str, Any]] = {}

    def roles(self) -> dict[str, Role]:
        if self.residual is None:
            return {}
        factors = ("residual_mixer", "residual_ffn")[: len(self.residual)]
        return {"residual": rows("scalar", dict.fromkeys(factors, 1), constant(self.initial))}

    def forward(
        self,
        x_BTD: Tensor,
        ctx: Context,
        cache: Cache | None = None,
        mixer_input: Tensor | None = None,
    ) -> tuple[Tensor, Aux]:
        """`mixer_input`, from the wires, is added to the normed input of the mixer."""
        return self._call("block", self.run, x_BTD, ctx, cache, mixer_input)

    def run(self, x_BTD: Tensor, ctx: Context, cache: Cache | None, mixer_input) -> tuple[Tensor, Aux]:
        h_BTD = self.mixer_norm(x_BTD)
        h_BTD = h_BTD if mixer_input is None else h_BTD + mixer_input
        y_BTD, aux = self._call("mixer", self.mixer, h_BTD, ctx, cache)
        x_BTD = self._carry(x_BTD, 0) + y_BTD
        if self.ffn is None:
            return x_BTD, aux
        y_BTD, ffn_aux = self._call("ffn", self.ffn, self.ffn_norm(x_BTD), ctx)
        return self._carry(x_BTD, 1) + y_BTD, {**aux, **ffn_aux}

    def _carry(self, x_BTD: Tensor, branch: int) -> Tensor:
        """The residual stream as it meets the output of a branch."""
        return x_BTD if self.residual is None else self.residual[branch] * x_BTD

    def _call(self, what: str, function: Callable, *arguments: Any) -> tuple[Tensor, Aux]:
        """`function`, run again in backward if the plan says so of `what`; decoding, with its caches, never trains."""
        if what not in self.recompute or not self.training:
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, **self.recompute[what])
