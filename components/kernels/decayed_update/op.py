"""The last pass of an orthogonalising optimizer over its weights: update and weight decay, many tensors at once."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from components.kernels.blocks import BLOCK, Addresses, Blocks, dense
from components.kernels.decayed_update.kernels import decayed_update
from components.kernels.decayed_update.reference import decayed_update_reference


@final
class DecayedUpdate:
    """w <- w - lr (u + decay w) for tensors of given sizes, each call on the same ones."""

    def __init__(self, sizes: Sequence[int]):
        """`sizes`: elements of each tensor."""
        self._blocks, self._weights = Blocks(sizes), Addresses()

    def __call__(self, weights: Sequence[Tensor], update: Tensor, lr: float, decay: float, cautious: bool) -> None:
        """In place, the decay only where u w > 0 if `cautious`. `update`: flat, the u of all weights one after another,
        in any dtype; the sum is done in the weights'."""
        if weights and update.is_cuda and dense(weights):
            self.launch(weights, update, lr, decay, cautious)
        else:
            decayed_update_reference(weights, update, lr, decay, cautious)

    def launch(self, weights: Sequence[Tensor], update: Tensor, lr: float, decay: float, cautious: bool) -> None:
        """The Triton form: fp32 weights, each contiguous."""
        table = self._blocks.table(update.device)
        decayed_update(
            len(table[0]),
            self._weights.of(weights),
            *table,
            update,
            float(lr),
            float(decay),
            CAUTIOUS=cautious,
            ALIGNED=self._blocks.aligned and self._weights.aligned,
            BLOCK=BLOCK,
            num_warps=8,
        )
