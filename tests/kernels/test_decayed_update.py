"""The update of weights with decay: the operations against their equation, the kernel against the operations."""

import pytest
import torch

from components.kernels.blocks import Part
from components.kernels.decayed_update.op import DecayedUpdate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernel runs on either
EVEN, UNEVEN = [(4, 8), (2, 16), (64, 80)], [(5, 7), (1, 3), (70, 100)]


def expected(weights, update, lr, decay, cautious):
    parts = update.double().split([w.numel() for w in weights])
    for w, u in zip(weights, parts, strict=True):
        w, u = w.double(), u.view(w.shape)
        kept = (u * w > 0) if cautious else 1
        yield w - lr * (u + decay * kept * w)


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay, cautious", [(0.0, False), (0.3, False), (0.3, True)])
@pytest.mark.parametrize("method", ["__call__", "launch"])
def test_weights_move_against_the_update_and_decay_as_the_equation_says(shapes, dtype, decay, cautious, method):
    weights = [torch.randn(shape, device=DEVICE) for shape in shapes]
    sizes = [w.numel() for w in weights]
    update = DecayedUpdate([Part(i, (), sum(sizes[:i])) for i in range(len(sizes))])
    for _ in range(2):  # the second time with tensors that lie elsewhere
        weights = [w.clone() for w in weights]
        flat = torch.randn(sum(w.numel() for w in weights), device=DEVICE).to(dtype)
        wanted = list(expected(weights, flat, 0.1, decay, cautious))
        getattr(update, method)(weights, flat, 0.1, decay, cautious)
        for w, other in zip(weights, wanted, strict=True):
            torch.testing.assert_close(w.double(), other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["__call__", "launch"])
def test_parts_of_weights_take_their_part_of_the_update_and_the_rest_stays(method):
    w, update = torch.randn(6, 16, device=DEVICE), torch.randn(64, device=DEVICE)
    before, parts = w.clone(), [Part(0, (slice(4, 6),), 0), Part(0, (slice(1, 2),), 48)]
    getattr(DecayedUpdate(parts), method)([w], update, 0.5, 0.0, False)
    torch.testing.assert_close(w[4:], before[4:] - 0.5 * update[:32].view(2, 16))
    torch.testing.assert_close(w[1], before[1] - 0.5 * update[48:])
    assert torch.equal(w[[0, 2, 3]], before[[0, 2, 3]])


def test_no_tensors_are_left_alone():
    DecayedUpdate([])([], torch.zeros(0), 0.1, 0.1, True)
