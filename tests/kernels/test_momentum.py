"""Momentum: the operations and the kernel against their equation."""

import pytest
import torch

from components.kernels.momentum.op import Momentum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernel runs on either
EVEN, UNEVEN = [(4, 8), (2, 16), (64, 80)], [(5, 7), (1, 3), (70, 100)]


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", ["__call__", "launch"])
def test_averages_move_as_the_equation_says_and_are_rounded_into_the_buffer(shapes, dtype, nesterov, method):
    momenta = [torch.randn(shape, device=DEVICE) for shape in shapes]
    update = Momentum([m.numel() for m in momenta])
    for _ in range(2):  # the second time with tensors that lie elsewhere
        momenta, gradients = [m.clone() for m in momenta], [torch.randn(m.shape, device=DEVICE) for m in momenta]
        wanted = [0.9 * m.double() + 0.1 * g.double() for m, g in zip(momenta, gradients, strict=True)]
        ahead = [0.9 * m + 0.1 * g.double() for m, g in zip(wanted, gradients, strict=True)] if nesterov else wanted
        rounded = torch.empty(sum(m.numel() for m in momenta), dtype=dtype, device=DEVICE)
        getattr(update, method)(momenta, gradients, rounded, 0.9, nesterov)
        for m, other in zip(momenta, wanted, strict=True):
            torch.testing.assert_close(m.double(), other, rtol=1e-6, atol=1e-6)
        flat = torch.cat([m.flatten() for m in ahead])
        torch.testing.assert_close(rounded.double(), flat, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


def test_no_tensors_are_left_alone():
    Momentum([])([], [], torch.zeros(0), 0.9, True)
