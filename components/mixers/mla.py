"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with grouped key-value heads.

Keys and values come from one small latent a token; a rotary key, shared by all heads, carries position. Only the two
are cached. Shapes: B batch, T sequence, L cached positions, D width, H query heads, G key-value heads, K head width,
V value width, C latent width, R rotary width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.interfaces import Aux, Context
from components.layers.initial import LINEAR_STD, residual_std
from components.layers.norm import RMSNorm
from components.layers.rotary import angles_in, rotate
from components.mixers.cache import PositionCache
from components.parameters import Role, normal, rows, whole
from registry import register


@register(
    "mixer",
    "mla",
    example={"heads": 4, "kv_heads": 2, "q_rank": 16, "kv_rank": 8, "head_dim": 16, "value_dim": 16, "rotary_dim": 4},
)
class MLA(nn.Module):
    """Latent attention: low-rank queries, one latent and one rotary key a token, grouped heads, causal."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        heads: int  # query heads H
        kv_heads: int  # key-value heads G
        q_rank: int  # width of the query latent
        kv_rank: int  # width C of the cached key-value latent
        head_dim: int  # width K of a query or key head, rotary part included
        value_dim: int | None = None  # width V of a value head; head_dim if left out
        rotary_dim: int = 32  # width R of the rotary key that all heads share
        rope: Literal["partial", "full"] = "partial"  # rotate the shared key only, or the whole assembled head
        rope_theta: float = 10_000.0  # base of the rotary frequencies
        head_map: Literal["group", "floor"] = "group"  # query head h reads h // (H / G), or floor(h G / H)

        def __post_init__(self):
            if self.head_map == "group" and self.heads % self.kv_heads:
                raise ValueError(
                    f"heads = {self.heads} do not divide among kv_heads = {self.kv_heads}; "
                    f'change one, or set head_map = "floor" (query head h reads key-value head floor(h·G/H))'
                )
            if self.kv_heads > self.heads:
                raise ValueError(f"kv_heads = {self.kv_heads} are more than heads = {self.heads}")
            if self.rotary_dim % 2 or not 0 < self.rotary_dim < self.head_dim:
                raise ValueError(f"rotary_dim = {self.rotary_dim} must be even and below head_dim = {self.head_dim}")
            if self.rope == "full" and self.head_dim % 2:
                raise ValueError(f'head_dim = {self.head_dim} must be even for rope = "full"')

        @property
        def values(self) -> int:
            return self.value_dim or self.head_dim

        @property
        def rotation(self) -> tuple[int, float]:
            return self.rotary_dim if self.rope == "partial" else self.head_dim, self.rope_theta

        def _matmul_parameters(self, dim: int) -> int:
            down = dim * (self.q_rank + self.kv_rank + self.rotary_dim)
            up_q = self.q_rank * self.heads * self.head_dim
            up_kv = self.kv_rank * self.kv_heads * (self.head_dim - self.rotary_dim + self.values)
            return down + up_q + up_kv + self.heads * self.values * dim

        def parameters(self, dim: int) -> int:
            return self._matmul_parameters(dim) + self.q_rank + self.kv_rank

        def active_parameters(self, dim: int) -> int:
            return self.parameters(dim)

        def flops(self, dim: int, seq_len: int) -> dict[str, float]:
            causal = 2.0 * self.heads * (self.head_dim + self.values) * seq_len / 2
            return {"matmul": 2.0 * self._matmul_parameters(dim), "attention": causal}

        def cache_numbers(self) -> int:
            """Numbers a token that decoding keeps."""
            return self.expanded_cache_numbers() if self.rope == "full" else self.kv_rank + self.rotary_dim

        def expanded_cache_numbers(self) -> int:
            """What it would keep as keys and values of every head."""
            return self.kv_heads * (self.head_dim + self.values)

    def __init__(self, config: Config, *, dim: int, layer: int, branches: int):
        super().__init__()
        c = self.config = config
        self.scale, self.out_std = c.head_dim**-0.5, residual_std(branches)
        self.q_norm = RMSNorm(RMSNorm.Config(), dim=c.q_rank)
        self.kv_norm = RMSNorm(RMSNorm.Config(), dim=c.kv_rank)
        self.down = nn.Parameter(torch.empty(c.q_rank + c.kv_rank + c.rotary_dim, dim))
        self.q_up = nn.Parameter(torch.empty(c.heads * c.head_dim, c.q_rank))
        self.kv_up = nn.Parameter(torch.empty(c.kv_heads * (c.head_dim - c.rotary_dim + c.values), c.kv_rank))
        self.out = nn.Parameter(torch.empty(dim, c.heads * c.values))

    def roles(self) -> dict[str, Role]:
        c = self.config
        sizes = {"q_a": c.q_rank, "kv_a": c.kv_rank + c.rotary_dim}
        return {
            "down": rows("matrix", sizes, normal(LINEAR_STD)),
            "q_up": whole("matrix", "q_b", normal(LINEAR_STD)),
            "kv_up": whole("matrix", "kv_b", normal(LINEAR_STD)),
            "out": whole("matrix", "o", normal(self.out_std)),
        }

    def forward(self, x_BTD: Tensor, ctx: Context, cache: PositionCache | None = None) -> tuple[Tensor, Aux]:
        c = self.config
        q_a, latent, rotary_key = F.linear(x_BTD, self.down).split([c.q_rank, c.kv_rank, c.rotary_dim], -1)
        q_BTHK = F.linear(self.q_norm(q_a), self.q_up).unflatten(-1, (c.heads, c.head_dim))
        latent_BTC, rotary_key_BT1R = self.kv_norm(latent), rotary_key[:, :, None]
        if c.rope == "full":
            o_BTHV = self._attend_full(q_BTHK, latent_BTC, rotary_key_BT1R, ctx, cache)
        else:
            angles = angles_in(ctx, c.rotation)
            q_BTHK, rotary_key_BT1R = rotate(q_BTHK, angles), rotate(rotary_key_BT1R, angles)
            o_BTHV = self._attend(q_BTHK, latent_BTC, rotary_key_BT1R, ctx, cache)
        return F.linear(o_BTHV.flatten(2), self.out), {}

    def _attend(self, q_BTHK, latent_BTC, rotary_key_BT1R, ctx: Context, cache: PositionCache | None) -> Tensor:
        """Partial rotation: the cache holds the latent and the rotated shared key."""
        if cache is None:
            return self._sdpa(q_BTHK, *self._expand(latent_BTC, rotary_key_BT1R), document_mask(ctx))
        held = cache.append({"latent": latent_BTC, "rotary_key": rotary_key_BT1R[:, :, 0]})
        visible_BTL = cache.visible_BTL(q_BTHK.shape[1])
        latent_BLC, rotary_BLR = held["latent"].to(q_BTHK.dtype), held["rotary_key"].to(q_BTHK.dtype)
        if q_BTHK.shape[1] == 1:
            return self._absorbed(q_BTHK, latent_BLC, rotary_BLR, visible_BTL)
        return self._sdpa(q_BTHK, *self._expand(latent_BLC, rotary_BLR[:, :, None]), visible_BTL[:, None])

    def _attend_full(self, q_BTHK, latent_BTC, rotary_key_BT1R, ctx: Context, cache: PositionCache | None) -> Tensor:
        """Full rotation: keys rotate after the up-projection, so the cache holds them expanded."""
        angles = angles_in(ctx, self.config.rotation)
        k_BTGK, v_BTGV = self._expand(latent_BTC, rotary_key_BT1R)
        q_BTHK, k_BTGK = rotate(q_BTHK, angles), rotate(k_BTGK, angles)
        if cache is None:
            return self._sdpa(q_BTHK, k_BTGK, v_BTGV, document_mask(ctx))
        held = cache.append({"key": k_BTGK, "value": v_BTGV})
        k_BLGK, v_BLGV = held["key"].to(q_BTHK.dtype), held["value"].to(q_BTHK.dtype)
        return self._sdpa(q_BTHK, k_BLGK, v_BLGV, cache.visible_BTL(q_BTHK.shape[1])[:, None])

    def _expand(self, latent_BTC: Tensor, rotary_key_BT1R: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, T, G, K), rotary part first, and values (B, T, G, V)."""
        c = self.config
        up = F.linear(latent_BTC, self.kv_up).unflatten(-1, (c.kv_heads, -1))
        plain_key, v_BTGV = up.split([c.head_dim - c.rotary_dim, c.values], -1)
        return torch.cat([rotary_key_BT1R.expand(-1, -1, c.kv_heads, -1), plain_key], -1), v_BTGV

    def _sdpa(self, q_BTHK: Tensor, k_BLGK: Tensor, v_BLGV: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BLGK, v_BLGV))
        if self.config.head_map == "floor":
            k, v = k[:, self._reads()], v[:, self._reads()]
        grouped = k.shape[1] != q.shape[1]
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return o.transpose(1, 2)

    def _absorbed(self, q_B1HK: Tensor, latent_BLC: Tensor, rotary_BLR: Tensor, visible_B1L: Tensor) -> Tensor:
        """One new token: the up-projections move to the query and the output, so no key is ever expanded."""
        c = self.config
        up = self.kv_up.unflatten(0, (c.kv_heads, -1))[self._reads()]
        key_up_HSC, value_up_HVC = up.split([c.head_dim - c.rotary_dim, c.values], 1)
        q_rotary, q_plain = q_B1HK[:, 0].split([c.rotary_dim, c.head_dim - c.rotary_dim], -1)
        q_latent = torch.einsum("bhs,hsc->bhc", q_plain, key_up_HSC)
        scores = torch.einsum("bhc,blc->bhl", q_latent, latent_BLC) + torch.einsum("bhr,blr->bhl", q_rotary, rotary_BLR)
        weights = (self.scale * scores.float()).masked_fill(~visible_B1L, -torch.inf).softmax(-1).to(latent_BLC.dtype)
        mixed = torch.einsum("bhl,blc->bhc", weights, latent_BLC)
        return torch.einsum("bhc,hvc->bhv", mixed, value_up_HVC)[:, None]

    def _reads(self) -> list[int]:
        """The key-value head of each query head; where the heads divide, both maps are the same."""
        c = self.config
        return [h * c.kv_heads // c.heads for h in range(c.heads)]

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> PositionCache:
        c = self.config
        shapes = {"latent": (c.kv_rank,), "rotary_key": (c.rotary_dim,)}
        if c.rope == "full":
            shapes = {"key": (c.kv_heads, c.head_dim), "value": (c.kv_heads, c.values)}
        held = {n: torch.zeros(batch, max_len, *s, dtype=dtype, device=device) for n, s in shapes.items()}
        return PositionCache(held)


def document_mask(ctx: Context) -> Tensor | None:
    """Causal and within the document, bool (B, 1, T, T); None where plain causal attention will do."""
    if ctx.document_BT is None:
        return None
    same = ctx.document_BT[:, :, None] == ctx.document_BT[:, None, :]
    return same.tril()[:, None]
