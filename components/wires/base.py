"""What a wire is: connections of a stack beside its blocks.

A wire acts around every step of the flattened stack. What it carries from step to step lies in `state`, a dict of one
forward pass, never on the module; labels in it are the wire's own. Shapes: B batch, T sequence, D width.
"""

from torch import Tensor, nn

from components.models.stack import Step


class Wire(nn.Module):
    """Abstract: hooks that change nothing. A Config has `parameters(dim, steps)`, and `check(steps)` says why the wire
    cannot lie in a stack of these steps, or None."""

    def before(self, x_BTD: Tensor, step: Step, state: dict[str, Tensor]) -> Tensor:
        """The residual stream that the block of this step is to see."""
        return x_BTD

    def mixer_input(self, step: Step) -> Tensor | None:
        """What is added to the normed input of this step's mixer, (D,), or None. A tensor and not a function, so that
        all steps of a looped block run the same compiled code."""
        return None

    def after(self, x_BTD: Tensor, step: Step, state: dict[str, Tensor]) -> Tensor:
        """The residual stream that goes on."""
        return x_BTD
