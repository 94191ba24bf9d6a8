"""Grouped-query attention (Ainslie et al., arXiv 2305.13245): no biases, no query-key norm, partial rotary positions.

Ghost attention (Auron, part II): the first attention layer computes keys and values and lends them; later layers only
query. What is lent travels as return value and Context, never on a module, so that recomputation and graphs see it.
Shapes: B batch, T sequence, L attended positions, D width, H query heads, G key-value heads, K head width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.interfaces import LENT, Aux, Context
from components.layers.initial import LINEAR_STD, residual_std
from components.layers.rotary import angles_in, rotate
from components.mixers.cache import BorrowingCache, PositionCache, visible_BTL
from components.mixers.mla import document_mask
from components.parameters import Role, normal, rows, whole
from registry import register


@register("mixer", "gqa", example={"heads": 4, "kv_heads": 2, "head_dim": 16})
class GQA(nn.Module):
    """Causal attention of H query heads on G key-value heads, its own or those that an earlier layer lends."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        heads: int  # query heads H
        kv_heads: int  # key-value heads G
        head_dim: int  # width K of a head
        rotary_fraction: float = 0.25  # share of the head that rotates; 0 is NoPE
        rope_theta: float = 10_000.0  # base of the rotary frequencies
        keys: Literal["own", "lent", "borrowed"] = "own"  # keys and values: own; own and lent on; an earlier layer's

        def __post_init__(self):
            if self.heads % self.kv_heads:
                raise ValueError(f"heads = {self.heads} do not divide among kv_heads = {self.kv_heads}; change one")
            if not 0 <= self.rotary_fraction <= 1 or self.rotary_dim % 2:
                raise ValueError(
                    f"rotary_fraction = {self.rotary_fraction} of head_dim = {self.head_dim} is {self.rotary_dim} "
                    "features, which must be an even part of the head"
                )

        @property
        def rotary_dim(self) -> int:
            return int(self.rotary_fraction * self.head_dim)

        @property
        def rotation(self) -> tuple[int, float] | None:
            return (self.rotary_dim, self.rope_theta) if self.rotary_dim else None

        @property
        def lends(self) -> tuple[int, int] | None:
            """The heads and their width that later layers may borrow."""
            return (self.kv_heads, self.head_dim) if self.keys == "lent" else None

        @property
        def borrows(self) -> tuple[int, int] | None:
            """The heads and their width that an earlier layer must lend."""
            return (self.kv_heads, self.head_dim) if self.keys == "borrowed" else None

        @property
        def widths(self) -> dict[str, int]:
            """Rows of the projections of the input."""
            keys = {} if self.borrows else dict.fromkeys(("k", "v"), self.kv_heads * self.head_dim)
            return {"q": self.heads * self.head_dim, **keys}

        def parameters(self, dim: int) -> int:
            return dim * (sum(self.widths.values()) + self.heads * self.head_dim)

        def active_parameters(self, dim: int) -> int:
            return self.parameters(dim)

        def flops(self, dim: int, seq_len: int) -> dict[str, float]:
            causal = 2.0 * self.heads * 2 * self.head_dim * seq_len / 2
            return {"matmul": 2.0 * self.parameters(dim), "attention": causal}

        def cache_numbers(self) -> int:
            """Numbers a token that decoding keeps."""
            return 0 if self.borrows else 2 * self.kv_heads * self.head_dim

    def __init__(self, config: Config, *, dim: int, layer: int, branches: int):
        super().__init__()
        self.config, self.out_std = config, residual_std(branches)
        self.qkv = nn.Parameter(torch.empty(sum(config.widths.values()), dim))
        self.out = nn.Parameter(torch.empty(dim, config.heads * config.head_dim))

    def roles(self) -> dict[str, Role]:
        return {
            "qkv": rows("matrix", self.config.widths, normal(LINEAR_STD)),
            "out": whole("matrix", "o", normal(self.out_std)),
        }

    def forward(self, x_BTD: Tensor, ctx: Context, cache=None) -> tuple[Tensor, Aux]:
        q_BTHK, *own = self._project(x_BTD, ctx)
        k_BLGK, v_BLGK, mask = self._borrowed(ctx, cache, q_BTHK) if not own else self._held(*own, ctx, cache)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BLGK, v_BLGK))
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.config.kv_heads != self.config.heads
        )
        lent = (k_BLGK.contiguous(), v_BLGK.contiguous()) if self.config.lends else ()
        return F.linear(o.transpose(1, 2).flatten(2), self.out), dict(zip(LENT, lent, strict=False))

    def _project(self, x_BTD: Tensor, ctx: Context) -> list[Tensor]:
        """Rotated queries and, unless they are borrowed, rotated keys, and values; (B, T, heads, K) each."""
        c = self.config
        projected = F.linear(x_BTD, self.qkv).split(list(c.widths.values()), -1)
        heads = [x.unflatten(-1, (-1, c.head_dim)) for x in projected]
        if c.rotation is None:
            return heads
        angles = angles_in(ctx, c.rotation)
        return [*(rotate(x, angles) for x in heads[:2]), *heads[2:]]

    def _held(self, k_BTGK: Tensor, v_BTGK: Tensor, ctx: Context, cache: PositionCache | None):
        """Own keys, values and mask: of these tokens, or with a cache of all that it has taken in."""
        if cache is None:
            return k_BTGK, v_BTGK, document_mask(ctx)
        held = cache.append({"key": k_BTGK, "value": v_BTGK})
        k_BLGK, v_BLGK = held["key"].to(k_BTGK.dtype), held["value"].to(v_BTGK.dtype)
        return k_BLGK, v_BLGK, cache.visible_BTL(k_BTGK.shape[1])[:, None]

    def _borrowed(self, ctx: Context, cache: BorrowingCache | None, q_BTHK: Tensor):
        """The lender's keys, values and mask."""
        if cache is None:
            return ctx.lent_keys, ctx.lent_values, document_mask(ctx)
        length, capacity = q_BTHK.shape[1], ctx.lent_keys.shape[1]
        cache.lengths_B += length
        return ctx.lent_keys, ctx.lent_values, visible_BTL(cache.lengths_B, length, capacity)[:, None]

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device):
        c = self.config
        if c.borrows:
            return BorrowingCache(batch, device)
        shape = (batch, max_len, c.kv_heads, c.head_dim)
        return PositionCache({name: torch.zeros(shape, dtype=dtype, device=device) for name in ("key", "value")})
