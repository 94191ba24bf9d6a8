"""The gated norm: the op against autograd of the written-out form in float64, the Triton form against the same."""

import itertools

import pytest
import torch

from components.kernels.gated_norm import gated_norm, launch
from components.kernels.gated_norm.reference import gated_norm_reference
from tests.kernels.recording import recorded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run on either
EPS = 1e-3
SIZES = [(2, 9, 6, 24), (1, 3, 5, 32), (2, 1, 3, 8), (1, 21, 4, 256)]  # B, T, H, V: no multiple of a tile
PARTS = pytest.mark.parametrize(("skip", "weight"), [*itertools.product((True, False), repeat=2)])


def inputs(B, T, H, V, skip=True, weight=True, dtype=torch.float32):
    """o, v, D, weight, gate: v and the gate are columns of something wider."""
    joint = torch.randn(B, T, 3 * H * V, device=DEVICE).to(dtype)
    o = torch.randn(B, T, H, V, device=DEVICE).to(dtype)
    v, D = (joint[..., : H * V].unflatten(-1, (H, V)), torch.randn(H, device=DEVICE)) if skip else (None, None)
    return o, v, D, torch.randn(V, device=DEVICE).to(dtype) if weight else None, joint[..., 2 * H * V :]


def results(function, x, dy, dtype=None):
    """y and the gradients of what is there of o, v, D, weight, gate."""
    x = [None if y is None else y.detach().to(dtype or y.dtype).requires_grad_() for y in x]
    o, v, D, weight, gate = x
    y = function(o, gate, weight, v_BTHV=v, D_H=D, eps=EPS)
    return y.detach(), *torch.autograd.grad(y, [z for z in x if z is not None], dy.to(y.dtype))


def in_triton(x, dy):
    y, (do, d_gate, *others) = launch.forward(*x, EPS), launch.backward(dy, *x, EPS)
    return y, do, *others, d_gate


def check(found, x, dy, forward, backward):
    """Relative errors (L2) of the output and of every gradient."""
    exact = results(gated_norm_reference, x, dy, torch.float64)
    for i, (one, other) in enumerate(zip(found, exact, strict=True)):
        assert (one.double() - other).norm() <= (backward if i else forward) * other.norm(), i


@PARTS
@pytest.mark.parametrize("size", SIZES)
def test_the_op_gives_autograds_outputs_and_gradients(size, skip, weight):
    x = inputs(*size, skip, weight, dtype=torch.float64)
    dy = torch.randn_like(x[-1])
    for one, other in zip(results(gated_norm, x, dy), results(gated_norm_reference, x, dy), strict=True):
        torch.testing.assert_close(one, other)


@PARTS
@pytest.mark.parametrize("size", SIZES)
def test_the_triton_form_gives_the_same(monkeypatch, size, skip, weight):
    monkeypatch.setattr(launch, "BACKWARD_PROGRAMS", 2)  # so that a program takes several tiles
    monkeypatch.setattr(launch, "BACKWARD_TILE", 256)
    x = inputs(*size, skip, weight)
    dy = torch.randn_like(x[-1])
    check(in_triton(x, dy), x, dy, 1e-6, 5e-6)


def test_dtypes_are_those_of_the_gate_and_of_what_a_gradient_belongs_to():
    o, v, D, weight, gate = inputs(1, 3, 2, 8)
    x = o, v.bfloat16(), D, weight.bfloat16(), gate.bfloat16()
    dy = torch.randn_like(x[-1])
    for found in (in_triton(x, dy), results(gated_norm, x, dy)):
        assert [y.dtype for y in found] == [gate.bfloat16().dtype, *(y.dtype for y in x)]


def test_unevenly_spaced_tokens_and_features_that_lie_apart_are_read_right():
    o, v, D, weight, gate = inputs(2, 5, 4, 16)
    x = o.mT.contiguous().mT, v.mT.contiguous().mT, D, weight, torch.cat([gate, gate[:, :1]], 1)[:, :5]
    dy = torch.randn(2, 64, 5, device=DEVICE).mT
    check(in_triton(x, dy), x, dy, 1e-6, 5e-6)


def test_no_tokens_give_no_output_and_gradients_of_zero():
    x = inputs(2, 0, 2, 8)
    dy = torch.randn_like(x[-1])
    for y, do, dv, dD, dweight, d_gate in (in_triton(x, dy), results(gated_norm, x, dy)):
        assert y.shape == d_gate.shape == (2, 0, 16) and do.shape == dv.shape == (2, 0, 2, 8)
        assert not dD.any() and not dweight.any()


def test_every_call_gives_the_same_bits():
    x = inputs(2, 50, 4, 32)
    dy = torch.randn_like(x[-1])
    for one, other in zip(in_triton(x, dy), in_triton(x, dy), strict=True):
        assert torch.equal(one, other)


def test_the_op_passes_pytorchs_own_checks():
    x = [None if y is None else y.requires_grad_() for y in inputs(1, 3, 2, 4, skip=False)]
    torch.library.opcheck(torch.ops.hymo.gated_norm, (*x, EPS))


def test_the_op_compiles_without_a_break():
    x = inputs(1, 3, 2, 4)
    dy = torch.randn_like(x[-1])
    whole = torch.compile(gated_norm, fullgraph=True, backend="aot_eager")
    for one, other in zip(results(whole, x, dy), results(gated_norm_reference, x, dy), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"D_H": None}, "v and D together"),
        ({"D_H": torch.ones(3)}, r"D of shape \(2,\), not \(3,\)"),
        ({"gate_BTI": torch.ones(1, 3, 4)}, r"gate of shape \(1, 3, 8\)"),
        ({"o_BTHV": torch.ones(1, 3, 8)}, r"o of shape \(B, T, H, V\)"),
    ],
)
def test_a_wrong_shape_is_refused_in_one_sentence(wrong, sentence):
    right = {"o_BTHV": torch.ones(1, 3, 2, 4), "gate_BTI": torch.ones(1, 3, 8), "D_H": torch.ones(2)}
    with pytest.raises(ValueError, match=sentence):
        gated_norm(**(right | {"v_BTHV": torch.ones(1, 3, 2, 4), "eps": EPS} | wrong))


@pytest.mark.gpu
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [(2, 1000, 40, 32), (2, 700, 12, 64), (2, 700, 12, 128), (1, 700, 12, 256)])
def test_bfloat16_at_the_widths_in_use_is_right_to_rounding(size, skip):
    x = inputs(*size, skip=skip, dtype=torch.bfloat16)
    dy = torch.randn_like(x[-1])
    found = results(gated_norm, x, dy)
    check(found, x, dy, 5e-3, 1e-2)
    for one, other in zip(found, results(gated_norm, x, dy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_the_whole_op_compiles_and_can_be_recorded():
    x = inputs(2, 100, 40, 32, dtype=torch.bfloat16)
    dy = torch.randn_like(x[-1])
    whole = torch.compile(gated_norm, fullgraph=True)
    graph, expected, found = recorded(lambda: results(whole, x, dy))
    check(expected, x, dy, 5e-3, 1e-2)
    for _ in range(2):
        for y in found:
            y.zero_()
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
