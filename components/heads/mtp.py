"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2, with a token-wise module in place of a block).

Depth d (1-based) at position i sees the previous depth's hidden state at i and the embedding of token i + d, and
predicts token i + d + 1:  fused = RMSNorm(h) + RMSNorm(emb);  h' = fused + SwiGLU(fused). It must never see the
token it predicts: a test holds the causality of every depth. Shapes: B batch, T sequence, D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from components.ffns.swiglu import SwiGLU
from components.interfaces import Context
from components.layers.norm import RMSNorm
from registry import register


class Depth(nn.Module):
    """One further token."""

    def __init__(self, hidden: int, dim: int, branches: int):
        super().__init__()
        self.hidden_norm = RMSNorm(RMSNorm.Config(), dim=dim)
        self.embedding_norm = RMSNorm(RMSNorm.Config(), dim=dim)
        self.ffn = SwiGLU(SwiGLU.Config(hidden=hidden), dim=dim, branches=branches)

    def forward(self, h_BTD: Tensor, embedding_BTD: Tensor, ctx: Context) -> Tensor:
        fused = self.hidden_norm(h_BTD) + self.embedding_norm(embedding_BTD)
        return fused + self.ffn(fused, ctx)[0]


@register("mtp", "mtp", example={"depth": 2, "weights": [0.3, 0.1], "hidden": 16})
class MTP(nn.Module):
    """Token-wise heads for the tokens after the next, through the shared embedding, final norm and output head."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        depth: int  # further tokens predicted
        weights: tuple[float, ...]  # of each depth's loss
        hidden: int  # width of each depth's SwiGLU
        detach_embedding: bool = False  # keep the depths' gradient out of the embedding table's input side

        def __post_init__(self):
            if self.depth < 1 or len(self.weights) != self.depth:
                raise ValueError(f"depth = {self.depth} needs one weight each, but weights has {len(self.weights)}")

        def parameters(self, dim: int) -> int:
            return self.depth * (3 * dim * self.hidden + 2 * dim)

        def active_parameters(self, dim: int) -> int:
            return self.parameters(dim)

        def flops(self, dim: int, seq_len: int) -> dict[str, float]:
            return {"matmul": 2.0 * self.depth * 3 * dim * self.hidden}

    def __init__(self, config: Config, *, dim: int, branches: int):
        super().__init__()
        self.config = config
        self.depths = nn.ModuleList(Depth(config.hidden, dim, branches) for _ in range(config.depth))

    def forward(self, h_BTD: Tensor, embedding_BTD: Tensor, ctx: Context) -> Iterator[Tensor]:
        """Each depth's hidden states in turn, (B, T, D). `h` is the stack's output before the final norm;
        `embedding` holds the embeddings of tokens 1 … T, which position i's main head predicts. Positions whose
        token i + d lies past the end see zeros there; they have no target."""
        if self.config.detach_embedding:
            embedding_BTD = embedding_BTD.detach()
        for d, depth in enumerate(self.depths):
            shifted = F.pad(embedding_BTD[:, d:], (0, 0, 0, d))
            h_BTD = depth(h_BTD, shifted, ctx)
            yield h_BTD
