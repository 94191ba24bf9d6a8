"""SwiGLU: a width that is padded to be fast computes what its equation says."""

import pytest
import torch
import torch.nn.functional as F

from components.ffns.swiglu import SwiGLU
from components.parameters import initialise
from tests.contracts.parts import DIM, context


@pytest.mark.parametrize("hidden", [1, 37, 64, 100])
def test_any_width_gives_the_equations_outputs_and_gradients(hidden):
    ffn = SwiGLU(SwiGLU.Config(hidden=hidden), dim=DIM, branches=4)
    initialise(ffn, 0)
    ffn.double()
    x = torch.randn(2, 5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gate, up = ffn.gate_up.chunk(2)
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ ffn.down.T
    y, _ = ffn(x, context(2, 5))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-15)
    for ours, theirs in zip(
        *(torch.autograd.grad(z.square().sum(), ffn.parameters()) for z in (y, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
