"""The first pass of an orthogonalising optimizer: moving averages of gradients, and what is to be orthogonalised."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from components.kernels.blocks import BLOCK, Addresses, Blocks, dense
from components.kernels.momentum.kernels import momentum
from components.kernels.momentum.reference import momentum_reference


@final
class Momentum:
    """m <- kept m + (1 - kept) g for tensors of given sizes, each call on the same ones."""

    def __init__(self, sizes: Sequence[int]):
        """`sizes`: elements of each tensor."""
        self._blocks = Blocks(sizes)
        self._momenta, self._gradients = Addresses(), Addresses()

    def __call__(
        self, momenta: Sequence[Tensor], gradients: Sequence[Tensor], rounded: Tensor, kept: float, nesterov: bool
    ) -> None:
        """In place, and all of them one after another into the flat `rounded`, in its dtype: m, or where `nesterov`
        looks a step ahead kept m + (1 - kept) g."""
        if momenta and rounded.is_cuda and dense(momenta) and dense(gradients):
            self.launch(momenta, gradients, rounded, kept, nesterov)
        else:
            momentum_reference(momenta, gradients, rounded, kept, nesterov)

    def launch(
        self, momenta: Sequence[Tensor], gradients: Sequence[Tensor], rounded: Tensor, kept: float, nesterov: bool
    ) -> None:
        """The Triton form: fp32, each contiguous."""
        table = self._blocks.table(rounded.device)
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
