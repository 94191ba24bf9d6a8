"""The last pass of an orthogonalising optimizer over its weights: update and weight decay, many tensors at once."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from components.kernels.blocks import BLOCK, Addresses, Blocks, Part
from components.kernels.decayed_update.kernels import decayed_update
from components.kernels.decayed_update.reference import decayed_update_reference


@final
class DecayedUpdate:
    """w <- w - lr (u + decay w) for given parts of tensors, each call on the same ones."""

    def __init__(self, parts: Sequence[Part]):
        self._blocks, self._weights = Blocks(parts), Addresses()

    def __call__(self, weights: Sequence[Tensor], update: Tensor, lr: float, decay: float, cautious: bool) -> None:
        """In place, the decay only where u w > 0 if `cautious`. `update`: flat, the u of each part in its place, in any
        dtype; the sum is done in the weights'."""
        blocks = self._blocks
        if not blocks.parts:
            return
        if update.is_cuda and blocks.dense(weights):
            self.launch(weights, update, lr, decay, cautious)
        else:
            w = blocks.views(weights)
            decayed_update_reference(w, blocks.beside(update, w), lr, decay, cautious)

    def launch(self, weights: Sequence[Tensor], update: Tensor, lr: float, decay: float, cautious: bool) -> None:
        """The Triton form, for weights that are `Blocks.dense`."""
        table = self._blocks.table(weights)
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
