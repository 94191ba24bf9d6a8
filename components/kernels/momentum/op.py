"""The first pass of an orthogonalising optimizer: moving averages of gradients, and what is to be orthogonalised."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from components.kernels.blocks import BLOCK, Addresses, Blocks, Part
from components.kernels.momentum.kernels import momentum
from components.kernels.momentum.reference import momentum_reference


@final
class Momentum:
    """m <- kept m + (1 - kept) g for given parts of tensors, each call on the same ones."""

    def __init__(self, parts: Sequence[Part]):
        self._blocks = Blocks(parts)
        self._momenta, self._gradients = Addresses(), Addresses()

    def __call__(
        self, momenta: Sequence[Tensor], gradients: Sequence[Tensor], rounded: Tensor, kept: float, nesterov: bool
    ) -> None:
        """In place, and each part into its place in the flat `rounded`, in its dtype: m, or where `nesterov` looks a
        step ahead kept m + (1 - kept) g."""
        blocks = self._blocks
        if not blocks.parts:
            return
        if rounded.is_cuda and blocks.dense(momenta) and blocks.dense(gradients):
            self.launch(momenta, gradients, rounded, kept, nesterov)
        else:
            m, g = blocks.views(momenta), blocks.views(gradients)
            momentum_reference(m, g, blocks.beside(rounded, m), kept, nesterov)

    def launch(
        self, momenta: Sequence[Tensor], gradients: Sequence[Tensor], rounded: Tensor, kept: float, nesterov: bool
    ) -> None:
        """The Triton form, for what is `Blocks.dense`."""
        table = self._blocks.table(momenta)
        addresses = self._momenta.of(momenta), self._gradients.of(gradients)
        momentum(
            len(table[0]),
            *addresses,
            *table,
            rounded,
            float(kept),
            NESTEROV=nesterov,
            ALIGNED=self._blocks.aligned and self._momenta.aligned and self._gradients.aligned,
            BLOCK=BLOCK,
            num_warps=8,
        )
