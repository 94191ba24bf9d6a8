"""The output head that shares the embedding's weights. Shapes: D width, V vocabulary."""

from dataclasses import dataclass

from torch import Tensor

from components.kernels.linear_cross_entropy.reference import softcapped_logits
from registry import register


@register("head", "tied", example={"softcap": 15.0})
class TiedHead:
    """Logits c·tanh(h Eᵀ / c) through the embedding E (Gemma 2's softcap, arXiv 2408.00118). Owns no parameter."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        softcap: float = 0.0  # c; 0 leaves the logits as they are

        def __post_init__(self):
            if self.softcap < 0:
                raise ValueError(f"softcap = {self.softcap} must not be negative; 0 turns it off")

        def flops(self, dim: int, vocab_size: int) -> dict[str, float]:
            return {"head": 2.0 * dim * vocab_size}

    def __init__(self, config: Config):
        self.softcap = config.softcap

    def logits(self, h: Tensor, weight_VD: Tensor) -> Tensor:
        """(..., V) in fp32 at least."""
        return softcapped_logits(h, weight_VD, self.softcap)
