"""A micro-batch, as the loader gives it and the model takes it.

Shapes: B sequences, T trained positions. A window holds T + 1 tokens: position i predicts token i + 1.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """tokens_BT1: int64. document_BT1: int32 document number within the row, None in `window` packing (one text runs
    through the row). position_BT: int64, restarts at each document. cu_seqlens: int32 document starts over the
    flattened B*T tokens, then B*T repeated up to a fixed length; None exactly where document_BT1 is.
    index: int64 (B,), each sequence's place in the run's global order.

    document_BT1 covers the last target too, so that no target crosses into the next document.
    """

    tokens_BT1: Tensor
    position_BT: Tensor
    index: Tensor
    document_BT1: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`, copied without blocking from pinned memory."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v if v is None else v.to(device, non_blocking=True) for k, v in moved.items()})

    def pin_memory(self) -> "Batch":
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v if v is None else v.pin_memory() for k, v in held.items()})
