"""Grouped products against one small product a row in float64: PyTorch's form, and Triton's on either device."""

import pytest
import torch
import torch.nn.functional as F

from components.kernels.grouped_gemm import launch, op
from components.kernels.grouped_gemm.op import grouped_mm, mixture_of_swiglu
from tests.kernels.recording import recorded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run on either
SIZES = [
    (37,),
    (5, 0, 17, 1, 14),
    (0, 0, 45, 0),  # one expert takes all
    (0, 16, 32, 0, 0),  # whole tiles, nothing at either end
    (0, 0, 0),
    tuple((7 * e) % 5 for e in range(64)),
]


def problem(sizes, P, Q, dtype=torch.float32):
    """Rows, weights, ends and the outputs' gradient."""
    rows = torch.randn(sum(sizes), P, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), P, Q, device=DEVICE).to(dtype).requires_grad_()
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)
    return rows, weight, ends, torch.randn(sum(sizes), Q, device=DEVICE).to(dtype)


def outputs_and_gradients(function, rows, weight, ends, dy):
    y = function(rows, weight, ends)
    return y.detach(), *torch.autograd.grad(y, (rows, weight), dy)


def exact(rows, weight, ends, dy):
    """In float64, each row with a copy of its expert's matrix."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    expert = torch.arange(len(ends), device=ends.device).repeat_interleave(sizes)
    rows, weight = (x.detach().double().requires_grad_() for x in (rows, weight))
    return outputs_and_gradients(
        lambda rows, weight, _: (rows[:, None] @ weight[expert])[:, 0], rows, weight, ends, dy.double()
    )


def error(found, expected):
    """The largest relative error of outputs and gradients."""
    pairs = zip(found, expected, strict=True)
    return max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)


@pytest.fixture
def triton_form(monkeypatch):
    """The op through the kernels on either device, in tiles of which small tensors fill several."""
    monkeypatch.setattr(op, "_form", lambda rows: launch)
    monkeypatch.setattr(launch, "HIGH", 16)
    monkeypatch.setattr(launch, "WIDE", 16)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("P", "Q"), [(16, 32), (9, 21), (35, 1)])
def test_the_kernels_give_the_products_and_both_gradients(triton_form, sizes, P, Q):
    inputs = problem(sizes, P, Q)
    assert error(outputs_and_gradients(grouped_mm, *inputs), exact(*inputs)) < 1e-6


@pytest.fixture
def filled():
    """Memory that nobody has written yet holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_write_every_value(triton_form, filled, sizes):
    rows, weight, ends, dy = problem(sizes, 9, 21)
    assert torch.empty(1, device=DEVICE).isnan()
    assert not launch.product(rows.detach(), weight.detach(), ends).isnan().any()
    assert not launch.weight_gradient(rows.detach(), dy, ends).isnan().any()


def test_tensors_that_do_not_lie_together_are_multiplied_too(triton_form):
    rows, weight, ends, dy = problem((5, 0, 17), 9, 21)
    rows, weight = (x.detach().mT.contiguous().mT.requires_grad_() for x in (rows, weight))
    inputs = rows, weight, ends, dy[:1].expand(22, 21)
    assert error(outputs_and_gradients(grouped_mm, *inputs), exact(*inputs)) < 1e-6


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_the_op_gives_the_products_and_both_gradients(sizes, dtype, tolerance):
    inputs = problem(sizes, 9, 21, dtype)
    assert error(outputs_and_gradients(grouped_mm, *inputs), exact(*inputs)) < tolerance


def test_the_op_gives_what_pytorchs_grouped_product_gives():
    inputs = problem((5, 0, 17), 8, 20)
    theirs = outputs_and_gradients(lambda rows, weight, ends: F.grouped_mm(rows, weight, offs=ends), *inputs)
    for one, other in zip(outputs_and_gradients(grouped_mm, *inputs), theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_only_the_gradients_that_are_asked_for_are_formed(monkeypatch):
    rows, weight, ends, dy = problem((5, 0, 17), 9, 21)
    monkeypatch.setattr(op.eager, "weight_gradient", lambda *_: pytest.fail("nobody asked for the weights' gradient"))
    monkeypatch.setattr(op.launch, "weight_gradient", op.eager.weight_gradient)
    grouped_mm(rows, weight.detach(), ends).backward(dy)
    assert error([rows.grad], exact(rows, weight, ends, dy)[1:2]) < 1e-6


def test_the_ops_pass_pytorchs_own_checks():
    rows, weight, ends, dy = problem((5, 0, 17), 9, 21)
    torch.library.opcheck(torch.ops.hymo.grouped_product, (rows, weight, ends))
    torch.library.opcheck(torch.ops.hymo.grouped_product_weight_gradient, (rows.detach(), dy, ends))


def test_a_mixture_in_fp32_compiles_in_one_piece():
    x, w13, w2 = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((7, 8), (3, 8, 32), (3, 16, 8)))
    expert, weight = torch.randint(0, 2, (7, 2), device=DEVICE), torch.rand(7, 2, device=DEVICE)

    def mixture(x, w13, w2):
        counts = (expert.flatten() == torch.arange(3, device=DEVICE)[:, None]).sum(1)
        return mixture_of_swiglu(x, w13, w2, expert, weight, counts)

    compiled = torch.compile(mixture, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(x, w13, w2).square().sum(), (x, w13, w2)) for f in (compiled, mixture))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


LARGE = [
    ((0, 1000, 3, 0, 129, 64, 900, 0), 896, 1000),
    ((777,), 100, 65),
    (tuple((37 * e) % 90 for e in range(64)), 72, 130),
]


@pytest.fixture
def tf32():
    """Puts the flag back. Monkeypatch would fail to: the flag is not in its object's dictionary."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("allowed", "precision"), [(False, "ieee"), (True, "tf32")])
def test_products_are_tf32_only_where_that_is_allowed(tf32, allowed, precision):
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert launch._precision() == precision


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "P", "Q"), LARGE)
def test_products_are_fp32_on_the_gpu_or_tf32_where_that_is_allowed(tf32, sizes, P, Q):
    inputs = problem(sizes, P, Q)
    for allowed, low, high in ((False, 0.0, 2e-6), (True, 2e-5, 2e-3)):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert low < error(outputs_and_gradients(grouped_mm, *inputs), exact(*inputs)) < high


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    inputs = problem(*LARGE[0])
    for one, other in zip(*(outputs_and_gradients(grouped_mm, *inputs) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_recording_follows_the_sizes_of_groups_that_a_replay_finds():
    rows, weight, ends, dy = problem((5, 0, 170, 1, 14), 40, 72)
    graph, _, found = recorded(lambda: outputs_and_gradients(grouped_mm, rows, weight, ends, dy))
    ends.copy_(torch.tensor([0, 100, 101, 101, 190]))
    graph.replay()
    assert error(found, exact(rows, weight, ends, dy)) < 2e-6
