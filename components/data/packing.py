"""From windows of tokens to a micro-batch, in one of two ways.

`window`: documents run on; a row is one stretch of text. `document`: the same tokens, and with them the number of
the document each token belongs to, so that attention, recurrences and targets stay inside a document.

Shapes: B rows, T trained positions; windows hold T + 1 tokens.
Left out on purpose: choosing documents so that rows fill without cutting any (best fit). It would tie a row's content
to its neighbours, and a row could no longer be computed from its index alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from components.data.batch import Batch
from components.data.config import Packing
from components.data.shards import MIN_DOCUMENT

Window = tuple[np.ndarray, np.ndarray]  # tokens (T + 1,), document starts within it without 0: both int64


def pack(windows: Sequence[Window], index: np.ndarray, packing: Packing) -> Batch:
    """One row a window; `index` (int64, B) is each row's place in the run."""
    tokens_BT1 = torch.from_numpy(np.stack([tokens for tokens, _ in windows]))
    index_B = torch.from_numpy(np.asarray(index, dtype=np.int64))
    B, T = tokens_BT1.shape[0], tokens_BT1.shape[1] - 1
    if packing == "window":
        return Batch(tokens_BT1, torch.arange(T).repeat(B, 1), index_B)
    rows = [starts for _, starts in windows]
    return Batch(
        tokens_BT1,
        torch.from_numpy(np.stack([_positions(starts, T) for starts in rows])),
        index_B,
        torch.from_numpy(np.stack([_documents(starts, T + 1) for starts in rows])),
        torch.from_numpy(_cu_seqlens(rows, T)),
    )


def cu_seqlens_length(batch: int, seq_len: int) -> int:
    """The fixed length of `cu_seqlens`. Documents have at least `MIN_DOCUMENT` tokens, so a row of T positions starts
    at most T // MIN_DOCUMENT + 1 of them and continues one more: it can never overflow."""
    return batch * (seq_len // MIN_DOCUMENT + 2) + 1


def valid_targets(batch: Batch) -> Tensor:
    """bool (B, T): positions whose next token belongs to the same document, the ones that are trained."""
    if batch.document_BT1 is None:
        return torch.ones_like(batch.position_BT, dtype=torch.bool)
    return batch.document_BT1[:, 1:] == batch.document_BT1[:, :-1]


def _documents(starts: np.ndarray, length: int) -> np.ndarray:
    """int32 (length,): 0 up to the first start, then one more at each."""
    found = np.zeros(length, dtype=np.int32)
    found[starts] = 1
    return np.cumsum(found, dtype=np.int32)


def _positions(starts: np.ndarray, T: int) -> np.ndarray:
    """int64 (T,): distance from the last document start, or from the row's start."""
    starts = starts[starts < T]
    begin = np.zeros(T, dtype=np.int64)
    begin[starts] = starts
    return np.arange(T) - np.maximum.accumulate(begin)


def _cu_seqlens(rows: Sequence[np.ndarray], T: int) -> np.ndarray:
    """int32: starts over the flattened B*T positions (each row is one), then B*T up to the fixed length."""
    B = len(rows)
    found = np.full(cu_seqlens_length(B, T), B * T, dtype=np.int32)
    starts = np.concatenate([b * T + np.concatenate([[0], s[s < T]]) for b, s in enumerate(rows)])
    found[: len(starts)] = starts
    return found
