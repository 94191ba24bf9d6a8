"""Which token each position is trained to predict. Shapes: B batch, T positions."""

import torch
from torch import Tensor

from components.data.batch import Batch
from components.kernels.linear_cross_entropy.reference import IGNORE


def targets(batch: Batch, ahead: int) -> Tensor:
    """Token i + ahead for each position i, int64 (B, T); IGNORE where the window ends before it or where it belongs
    to another document. `ahead` is 1 for the main head, d + 1 for MTP depth d."""
    tokens = batch.tokens_BT1
    length = tokens.shape[1] - 1
    target_BT = torch.full_like(tokens[:, :-1], IGNORE)
    target_BT[:, : length + 1 - ahead] = tokens[:, ahead:]
    if batch.document_BT1 is not None:
        document = batch.document_BT1
        crosses = document[:, : length + 1 - ahead] != document[:, ahead:]
        target_BT[:, : length + 1 - ahead].masked_fill_(crosses, IGNORE)
    return target_BT


def target_counts(batch: Batch, heads: int) -> Tensor:
    """How many positions each head trains, int64 (heads,): the main one, then each MTP depth."""
    return torch.stack([(targets(batch, 1 + d) != IGNORE).sum() for d in range(heads)])
