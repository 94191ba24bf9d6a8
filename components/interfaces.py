"""What the parts of a model promise each other: the context they are given, what they give back, the decode state.

Shapes: B batch, T sequence, D model width, E experts. Nothing here computes; nothing here imports a component.

A block must have no side effects: activation checkpointing, compile and graph capture run it again or run a
recording of it. So statistics travel out as return values (`Aux`) and mutable inputs are explicit (`Cache`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

# Detached statistics of fixed shape, by name; empty for most parts. The names below are no statistics: they carry
# gradients, and the model takes them out.
Aux = dict[str, Tensor]
LENT = ("lent_keys", "lent_values")  # what a mixer hands to later layers, which find it in their Context
BALANCE_LOSS = "balance_loss"  # 0-d, a mean over tokens: joins the gradient of the main loss, not its value


@dataclass(frozen=True)
class Context:
    """What a mixer may know of the tokens it mixes.

    position_BT: int64, restarts at 0 at each document. document_BT: int32 document number within the row, or None
    where each row is one document. cu_seqlens: int32, starts of the documents over the flattened B*T tokens, then
    B*T repeated up to a fixed length; None exactly where document_BT is. lent_keys, lent_values: what the nearest
    earlier layer that lends has lent, (B, L, G, K), L positions being T or, in decoding, the cache's capacity. angles:
    cosines and sines of the rotary embeddings in use, by (rotary width, theta); computed where one is not there.
    """

    position_BT: Tensor
    document_BT: Tensor | None = None
    cu_seqlens: Tensor | None = None
    lent_keys: Tensor | None = None
    lent_values: Tensor | None = None
    angles: Mapping[tuple[int, float], tuple[Tensor, Tensor]] = field(default_factory=dict)


class Cache(Protocol):
    """The decode state of one mixer. `lengths_B` counts the tokens each row has taken in."""

    lengths_B: Tensor

    def reorder(self, index: Tensor) -> None:
        """Keep rows `index` (int64), in that order: beam search, finished sequences."""

    def truncate(self, lengths_B: Tensor) -> None:
        """Forget all but the first `lengths_B` tokens of each row: drafted tokens that were refused."""


class Mixer(Protocol):
    """Mixes along the sequence, causally. With a cache it continues after the tokens the cache has taken in."""

    def forward(self, x_BTD: Tensor, ctx: Context, cache: Cache | None = None) -> tuple[Tensor, Aux]: ...

    def new_cache(self, batch: int, max_len: int, dtype, device) -> Cache: ...


class Ffn(Protocol):
    """Works on each token alone."""

    def forward(self, x_BTD: Tensor, ctx: Context) -> tuple[Tensor, Aux]: ...
