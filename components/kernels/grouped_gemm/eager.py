"""The PyTorch form: expert by expert, in any dtype. Waits for `ends`.

Shapes: M rows, E experts, P and Q widths in and out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def product(rows_MP: Tensor, weight_EPQ: Tensor, ends_E: Tensor) -> Tensor:
    """rows[ends[e−1]:ends[e]] @ weight[e] for every e, (M, Q)."""
    y_MQ = rows_MP.new_empty(len(rows_MP), weight_EPQ.shape[2])
    for weight_PQ, group in zip(weight_EPQ, _groups(ends_E), strict=True):
        torch.mm(rows_MP[group], weight_PQ, out=y_MQ[group])
    return y_MQ


def weight_gradient(rows_MP: Tensor, dy_MQ: Tensor, ends_E: Tensor) -> Tensor:
    """rowsᵀ @ dy of every expert's rows, (E, P, Q); zeros where there are none."""
    dweight_EPQ = rows_MP.new_empty(len(ends_E), rows_MP.shape[1], dy_MQ.shape[1])
    for dweight_PQ, group in zip(dweight_EPQ, _groups(ends_E), strict=True):
        torch.mm(rows_MP[group].T, dy_MQ[group], out=dweight_PQ)
    return dweight_EPQ


def _groups(ends_E: Tensor) -> Iterator[slice]:
    start = 0
    for end in ends_E.tolist():
        yield slice(start, end)
        start = end
