"""Decode states that several mixers share. The protocol is `components.interfaces.Cache`.

Shapes: B rows, L positions, the rest as each mixer says.
"""

import torch
from torch import Tensor


class PositionCache:
    """Per-position tensors of fixed capacity (keys and values, or latents), filled from the front.

    All rows take in the same number of tokens a call. `tensors` are (B, max_len, ...).
    """

    def __init__(self, tensors: dict[str, Tensor]):
        first = next(iter(tensors.values()))
        self.tensors = tensors
        self.max_len = first.shape[1]
        self.lengths_B = torch.zeros(first.shape[0], dtype=torch.int64, device=first.device)

    def append(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Store (B, T, ...) behind each row's tokens; the whole tensors back. The caller checks the capacity."""
        length = next(iter(new.values())).shape[1]
        place_BT = self.lengths_B[:, None] + torch.arange(length, device=self.lengths_B.device)
        row_B1 = torch.arange(len(place_BT), device=place_BT.device)[:, None]
        for name, value in new.items():
            self.tensors[name][row_B1, place_BT] = value.to(self.tensors[name].dtype)
        self.lengths_B += length
        return self.tensors

    def visible_BTL(self, length: int) -> Tensor:
        """Which positions each of the `length` newest tokens may attend to."""
        return visible_BTL(self.lengths_B, length, self.max_len)

    def reorder(self, index: Tensor) -> None:
        self.tensors = {name: value[index] for name, value in self.tensors.items()}
        self.lengths_B = self.lengths_B[index]

    def truncate(self, lengths_B: Tensor) -> None:
        self.lengths_B = torch.minimum(self.lengths_B, lengths_B)


class BorrowingCache:
    """Of a mixer that reads the keys and values of an earlier layer: only how many tokens it has taken in."""

    def __init__(self, batch: int, device: torch.device):
        self.lengths_B = torch.zeros(batch, dtype=torch.int64, device=device)

    def reorder(self, index: Tensor) -> None:
        self.lengths_B = self.lengths_B[index]

    def truncate(self, lengths_B: Tensor) -> None:
        self.lengths_B = torch.minimum(self.lengths_B, lengths_B)


class RecurrentCache:
    """A recurrent state and the last inputs of a short convolution. What was taken in cannot be taken out again, so
    the state after each of the last `snapshots` calls is kept for `truncate`.

    state_BHKV fp32; conv_BWC the last W − 1 inputs.
    """

    def __init__(self, state_BHKV: Tensor, conv_BWC: Tensor, snapshots: int = 0):
        self.state_BHKV, self.conv_BWC, self.snapshots = state_BHKV, conv_BWC, snapshots
        self.lengths_B = torch.zeros(state_BHKV.shape[0], dtype=torch.int64, device=state_BHKV.device)
        self._past: list[tuple[Tensor, Tensor, Tensor]] = []

    def advance(self, state_BHKV: Tensor, conv_BWC: Tensor, length: int) -> None:
        """Replace the state by the one after `length` more tokens."""
        self._past.append((self.lengths_B, self.state_BHKV, self.conv_BWC))
        self._past = self._past[-self.snapshots :] if self.snapshots else []
        self.state_BHKV, self.conv_BWC = state_BHKV, conv_BWC
        self.lengths_B = self.lengths_B + length

    def reorder(self, index: Tensor) -> None:
        self.state_BHKV, self.conv_BWC = self.state_BHKV[index], self.conv_BWC[index]
        self.lengths_B = self.lengths_B[index]
        self._past = [tuple(x[index] for x in past) for past in self._past]

    def truncate(self, lengths_B: Tensor) -> None:
        """Back to a snapshot of `lengths_B` tokens, row by row. Raises ValueError for a row without one."""
        lengths_B = torch.minimum(lengths_B, self.lengths_B)
        missing = lengths_B != self.lengths_B
        for past_lengths_B, state_BHKV, conv_BWC in reversed(self._past):
            take = missing & (past_lengths_B == lengths_B)
            self.state_BHKV = torch.where(take[:, None, None, None], state_BHKV, self.state_BHKV)
            self.conv_BWC = torch.where(take[:, None, None], conv_BWC, self.conv_BWC)
            missing = missing & ~take
        if missing.any():
            raise ValueError(f"no snapshot of a recurrent state at lengths {lengths_B.tolist()}; raise `snapshots`")
        self.lengths_B, self._past = lengths_B, []


def visible_BTL(lengths_B: Tensor, length: int, max_len: int) -> Tensor:
    """Which of `max_len` positions each of the `length` newest tokens of rows with `lengths_B` tokens may attend to:
    its own and all before. Bool."""
    device = lengths_B.device
    query_BT = lengths_B[:, None] - length + torch.arange(length, device=device)
    return torch.arange(max_len, device=device) <= query_BT[..., None]
