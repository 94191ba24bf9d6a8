"""The fused loss against the plain one: losses and both gradients, in PyTorch's form and in Triton's."""

from types import SimpleNamespace

import pytest
import torch

from components.kernels.linear_cross_entropy import eager, launch, op
from components.kernels.linear_cross_entropy.op import linear_cross_entropy
from components.kernels.linear_cross_entropy.reference import IGNORE, linear_cross_entropy_reference
from tests.kernels.recording import recorded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run on either
CAPS = (0.0, 2.0, 15.0, 60.0)  # none; within the bound that stands for the maximum; beyond it


def problem(N, D, V, dtype=torch.float32, spread=12.0):
    """Hidden states and weights, logits of that standard deviation, and targets of which every third is ignored."""
    h = torch.randn(N, D, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(V, D, device=DEVICE).mul(spread / D**0.5).to(dtype).requires_grad_()
    target = torch.randint(0, V, (N,), device=DEVICE)
    target[::3] = IGNORE
    return h, weight, target


def loss_and_gradients(function, h, weight, *rest):
    loss = function(h, weight, *rest)
    return loss, *torch.autograd.grad(3.0 * loss, (h, weight))


def exact(h, weight, target, softcap):
    wide = [x.detach().double().requires_grad_() for x in (h, weight)]
    return loss_and_gradients(linear_cross_entropy_reference, *wide, target, softcap)


def assert_near(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("V", [7, 100, 300])
def test_the_kernel_gives_the_losses_and_gradients_of_a_chunk(monkeypatch, softcap, V):
    monkeypatch.setattr(launch, "BLOCK", 128)
    z, target = 20 * torch.randn(9, V, device=DEVICE), torch.randint(0, V, (9,), device=DEVICE)
    target[[0, 5]], target[1], target[2] = IGNORE, 0, V - 1
    expected = eager.loss_and_gradient_(z.double(), target, softcap, True)
    found = launch.loss_and_gradient_(z.clone(), target, softcap, True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-6)


def test_the_kernel_leaves_logits_as_they_are_where_nothing_is_trained():
    z, target = torch.randn(3, 20, device=DEVICE), torch.tensor([1, IGNORE, 19], device=DEVICE)
    losses, left = launch.loss_and_gradient_(z.clone(), target, 15.0, False)
    torch.testing.assert_close(losses, eager.loss_and_gradient_(z.clone(), target, 15.0, False)[0])
    assert left.equal(z)


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("chunk", [4, 5, 64])
def test_the_op_through_the_kernel_equals_the_plain_loss(monkeypatch, softcap, chunk):
    monkeypatch.setattr(op, "_form", lambda h: launch)
    monkeypatch.setattr(launch, "BLOCK", 32)
    h, weight, target = problem(13, 8, 50)
    found = loss_and_gradients(linear_cross_entropy, h, weight, target, softcap, chunk)
    assert_near(found, exact(h, weight, target, softcap), 1e-6)


@pytest.mark.parametrize("chunk", [4, 64])
def test_16_bit_numbers_cost_what_rounding_costs(chunk):
    h, weight, target = problem(13, 8, 50, torch.bfloat16)
    loss, dh, dweight = loss_and_gradients(linear_cross_entropy, h, weight, target, 15.0, chunk)
    assert (loss.dtype, dh.dtype, dweight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert_near((loss, dh, dweight), exact(h, weight, target, 15.0), 1e-2)


def test_gradients_are_formed_only_where_something_is_trained(monkeypatch):
    asked, form = [], eager.loss_and_gradient_

    def recording(z, target, softcap, train):
        asked.append(train)
        return form(z, target, softcap, train)

    monkeypatch.setattr(op, "_form", lambda h: SimpleNamespace(loss_and_gradient_=recording))
    h, weight, target = problem(6, 4, 10)
    with torch.no_grad():
        linear_cross_entropy(h, weight, target, 15.0, 8)
    linear_cross_entropy(h.detach(), weight.detach(), target, 15.0, 8)
    assert asked == [False, False]
    linear_cross_entropy(h.detach(), weight, target, 15.0, 8)
    assert asked == [False, False, True]


def test_the_op_passes_pytorchs_own_checks():
    h, weight, target = problem(6, 4, 10)
    for train in (True, False):
        inputs = [x.detach().requires_grad_(train) for x in (h, weight)]
        torch.library.opcheck(torch.ops.hymo.linear_cross_entropy, (*inputs, target, 15.0, 4, train))


def test_compiled_code_around_it_sees_one_op_and_the_same_gradients():
    h, weight, target = problem(6, 4, 10)

    def scaled(h, weight):
        return 2 * linear_cross_entropy(2 * h, weight, target, 15.0, 4)

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    found, expected = (loss_and_gradients(function, h, weight) for function in (compiled, scaled))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_wrong_shape_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"not \(3, 4\), \(5, 6\) and \(3,\)"):
        linear_cross_entropy(torch.ones(3, 4), torch.ones(5, 6), torch.zeros(3, dtype=torch.int64), 15.0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-3), (torch.float16, 2e-3)])
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize(("N", "D", "V", "chunk"), [(300, 64, 5001, 128), (64, 896, 64256, 64), (17, 32, 100, 4096)])
def test_the_op_equals_the_plain_loss_on_the_gpu(dtype, tolerance, softcap, N, D, V, chunk):
    h, weight, target = problem(N, D, V, dtype, spread=3.0)
    found = loss_and_gradients(linear_cross_entropy, h, weight, target, softcap, chunk)
    assert_near(found, exact(h, weight, target, softcap), tolerance)


def run(h, weight, target):
    return loss_and_gradients(linear_cross_entropy, h, weight, target, 15.0, 128)


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    inputs = problem(304, 64, 5008, torch.bfloat16)
    for one, other in zip(run(*inputs), run(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_recording_gives_what_a_run_does():
    inputs = problem(304, 64, 5008, torch.bfloat16)
    graph, expected, found = recorded(lambda: run(*inputs))
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
