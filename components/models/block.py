"""One layer: x ← x + mixer(norm(x)); then, where there is an FFN, x ← x + ffn(norm(x)).

Shapes: B batch, T sequence, D width.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from components.interfaces import Aux, Cache, Context


class Block(nn.Module):
    """`recompute`, set by the parallel plan, drops the layer's activations and runs it again in the backward pass: the
    options of `torch.utils.checkpoint`, or None to keep everything."""

    def __init__(self, norm: Callable[[], nn.Module], mixer: nn.Module, ffn: nn.Module | None):
        super().__init__()
        self.mixer_norm, self.mixer = norm(), mixer
        self.ffn_norm, self.ffn = (None, None) if ffn is None else (norm(), ffn)
        self.recompute: dict | None = None

    def forward(
        self,
        x_BTD: Tensor,
        ctx: Context,
        cache: Cache | None = None,
        mixer_input: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Aux]:
        """`mixer_input`, from the wires, changes the normed input of the mixer."""
        if self.recompute is not None and self.training:
            return checkpoint(self._run, x_BTD, ctx, None, mixer_input, use_reentrant=False, **self.recompute)
        return self._run(x_BTD, ctx, cache, mixer_input)

    def _run(self, x_BTD: Tensor, ctx: Context, cache: Cache | None, mixer_input) -> tuple[Tensor, Aux]:
        h_BTD = self.mixer_norm(x_BTD)
        h_BTD = h_BTD if mixer_input is None else mixer_input(h_BTD)
        y_BTD, aux = self.mixer(h_BTD, ctx, cache)
        x_BTD = x_BTD + y_BTD
        if self.ffn is None:
            return x_BTD, aux
        y_BTD, ffn_aux = self.ffn(self.ffn_norm(x_BTD), ctx)
        return x_BTD + y_BTD, {**aux, **ffn_aux}
