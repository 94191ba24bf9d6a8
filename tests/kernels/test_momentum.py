"""Momentum: the operations and the kernel against their equation."""

from itertools import accumulate

import pytest
import torch

from components.kernels.blocks import Blocks, Part
from components.kernels.momentum import op
from components.kernels.momentum.op import Momentum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernel runs on either
EVEN, UNEVEN = [(4, 8), (2, 16), (64, 80)], [(5, 7), (1, 3), (70, 100)]


def one_after_another(tensors):
    begins = accumulate((t.numel() for t in tensors), initial=0)
    return [Part(i, (), begin) for i, begin in enumerate(list(begins)[:-1])]


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", ["__call__", "launch"])
def test_averages_move_as_the_equation_says_and_are_rounded_into_the_buffer(shapes, dtype, nesterov, method):
    momenta = [torch.randn(shape, device=DEVICE) for shape in shapes]
    update = Momentum(one_after_another(momenta))
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
    update, rounded = Momentum(one_after_another(even)), torch.empty(sum(m.numel() for m in even), device=DEVICE)
    for momenta, gradients in ((even, even), (even, [*even[:-1], last]), ([*even[:-1], last], even), (even, even)):
        update.launch(momenta, gradients, rounded, 0.9, False)
    same = shapes is EVEN
    assert launched == [same, aligned, aligned, same]


@pytest.mark.parametrize("method", ["__call__", "launch"])
def test_parts_of_tensors_go_where_they_are_to_lie_and_what_is_no_part_stays(method):
    m, g = [torch.randn(6, 16, device=DEVICE), torch.randn(32, device=DEVICE)], [torch.ones(6, 16), torch.ones(32)]
    before, g = [x.clone() for x in m], [x.to(DEVICE) for x in g]
    rounded = torch.full((80,), 7.0, device=DEVICE)
    parts = [Part(0, (slice(3, 5),), 48), Part(1, (slice(16, 32),), 0), Part(0, (slice(0, 1),), 16)]
    getattr(Momentum(parts), method)(m, g, rounded, 0.5, False)
    for part in parts:
        new = 0.5 * part.of(before) + 0.5
        torch.testing.assert_close(part.of(m), new)
        torch.testing.assert_close(rounded[part.start : part.start + new.numel()], new.flatten())
    assert torch.equal(m[0][[1, 2, 5]], before[0][[1, 2, 5]]) and torch.equal(m[1][:16], before[1][:16])
    assert bool((rounded[32:48] == 7).all())


def test_parts_and_tensors_with_gaps_are_not_launched():
    whole, rows, columns = (
        torch.zeros(4, 8),
        Blocks([Part(0, (slice(1, 3),), 0)]),
        Blocks([Part(0, (..., slice(2)), 0)]),
    )
    assert rows.dense([whole]) and not rows.dense([whole.mT]) and not rows.dense([whole.bfloat16()])
    assert not columns.dense([whole])


def test_no_tensors_are_left_alone():
    Momentum([])([], [], torch.zeros(0), 0.9, True)
