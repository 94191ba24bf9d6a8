"""Momentum: the operations and the kernel against their equation."""

import pytest
import torch

from components.kernels.blocks import dense
from components.kernels.momentum import op
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


@pytest.mark.parametrize(("shapes", "moved", "aligned"), [(EVEN, 0, True), (EVEN, 1, False), (UNEVEN, 0, False)])
def test_a_launch_counts_on_alignment_only_where_every_size_and_address_has_it(shapes, moved, aligned, monkeypatch):
    launched = []
    monkeypatch.setattr(op, "momentum", lambda *arguments, **constants: launched.append(constants["ALIGNED"]))
    even = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    last = torch.zeros(even[-1].numel() + moved, device=DEVICE)[moved:].view(shapes[-1])
    update, rounded = Momentum([m.numel() for m in even]), torch.empty(sum(m.numel() for m in even), device=DEVICE)
    for momenta, gradients in ((even, even), (even, [*even[:-1], last]), ([*even[:-1], last], even), (even, even)):
        update.launch(momenta, gradients, rounded, 0.9, False)
    same = shapes is EVEN
    assert launched == [same, aligned, aligned, same]


def test_tensors_with_gaps_are_not_launched():
    whole = torch.zeros(4, 8)
    assert dense([whole, whole[1:]]) and not dense([whole, whole[:, 1:]]) and not dense([whole.bfloat16()])


def test_no_tensors_are_left_alone():
    Momentum([])([], [], torch.zeros(0), 0.9, True)
