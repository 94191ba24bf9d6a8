"""The rotation and its written-out gradient, and who computes its angles."""

import torch

from components.kernels.rotation import turn
from components.layers import rotary
from components.layers.rotary import rotary_angles, rotate
from tests.models import tiny


def angles(R=4):
    return rotary_angles(torch.tensor([[0, 1, 2], [5, 6, 7]]), R, 100.0)


def test_a_pair_turns_as_a_complex_number_by_position_over_its_wavelength_and_the_rest_stays():
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    position = torch.tensor([[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]], dtype=torch.float64)
    turn = torch.polar(torch.ones(2, 3, 2, dtype=torch.float64), position[..., None] * torch.tensor([1.0, 0.1]))
    expected = torch.complex(x[..., :2], x[..., 2:4]) * turn[:, :, None]
    y = rotate(x, angles())
    torch.testing.assert_close(y[..., :4], torch.cat([expected.real, expected.imag], -1), rtol=1e-6, atol=1e-6)
    assert y[..., 4:].equal(x[..., 4:])


def test_its_gradient_is_that_of_the_formula():
    for width in (6, 4):  # with features that do not rotate, and without
        x = torch.randn(2, 3, 5, width, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: rotate(x, angles()), x)
        dy = torch.randn_like(x)
        (found,) = torch.autograd.grad(rotate(x, angles()), x, dy)
        (expected,) = torch.autograd.grad(turn(x, *angles()), x, dy)
        assert found.equal(expected)


def test_16_bit_features_turn_in_fp32():
    x = torch.randn(2, 3, 5, 6).bfloat16()
    assert rotate(x, angles()).equal(rotate(x.float(), angles()).bfloat16())


def test_a_compiler_traces_it_whole():
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    compiled = torch.compile(lambda x: rotate(2 * x, angles()), backend="aot_eager", fullgraph=True)
    dy = torch.randn_like(x)
    for function in (compiled, lambda x: rotate(2 * x, angles())):
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y, turn(2 * x, *angles()))
        torch.testing.assert_close(dx, 2 * turn(dy, angles().cos_BTr, -angles().sin_BTr))


def test_layers_use_the_angles_that_the_model_has_computed_once(monkeypatch):
    model, batch = tiny.model(), tiny.batch(tiny.tokens())
    expected = model(batch).loss_sums

    def refuse(*_):
        raise AssertionError("a layer computed angles of its own")

    monkeypatch.setattr(rotary, "rotary_angles", refuse)
    assert model(batch).loss_sums.equal(expected)
