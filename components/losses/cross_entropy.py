"""The two losses of a language model head: chunked (default) and plain. Both give a sum in nats over valid targets.

Shapes: B batch, T sequence, D width, V vocabulary. A target of IGNORE is not trained.
"""

from dataclasses import dataclass

from torch import Tensor

from components.kernels.linear_cross_entropy.op import linear_cross_entropy
from components.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from registry import register


@register("loss", "chunked_cross_entropy", example={"chunk": 16})
class ChunkedCrossEntropy:
    """Linear, softcap and cross-entropy together, a chunk of positions at a time: no full table of logits."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        chunk: int = 4096  # positions whose logits exist at once

        def __post_init__(self):
            if self.chunk < 1:
                raise ValueError(f"chunk must be at least 1, not {self.chunk}")

    def __init__(self, config: Config):
        self.chunk = config.chunk

    def __call__(self, h_BTD: Tensor, weight_VD: Tensor, target_BT: Tensor, softcap: float) -> Tensor:
        return linear_cross_entropy(h_BTD.flatten(0, 1), weight_VD, target_BT.flatten(), softcap, self.chunk)


@register("loss", "cross_entropy")
class CrossEntropy:
    """The plain reference: all logits at once, gradients by autograd."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config):
        pass

    def __call__(self, h_BTD: Tensor, weight_VD: Tensor, target_BT: Tensor, softcap: float) -> Tensor:
        return linear_cross_entropy_reference(h_BTD.flatten(0, 1), weight_VD, target_BT.flatten(), softcap)
