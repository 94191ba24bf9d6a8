"""SiLU(gate) ⊙ up: the op against autograd of the written-out form, the Triton form against both."""

import pytest
import torch

from components.kernels.swiglu import op
from components.kernels.swiglu.reference import swiglu_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run on either
SHAPES = [(3, 5, 16), (1, 2), (9, 514)]  # leading axes free; less than a tile, and parts of several


def outputs_and_gradient(function, gate_up, dy):
    x = gate_up.detach().double().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_op_gives_autograds_outputs_and_gradients(shape):
    gate_up = torch.randn(shape, dtype=torch.float64)
    dy = torch.randn(*shape[:-1], shape[-1] // 2)
    for found, wanted in zip(
        outputs_and_gradient(op.swiglu, gate_up, dy),
        outputs_and_gradient(swiglu_reference, gate_up, dy),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


DTYPES = pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_the_triton_form_gives_the_same(shape, dtype, tolerance):
    check_triton(shape, dtype, tolerance)


@DTYPES
@pytest.mark.gpu
def test_the_triton_form_gives_the_same_at_the_primarys_size(dtype, tolerance):
    check_triton((32768, 4608), dtype, tolerance)


def check_triton(shape, dtype, tolerance):
    gate_up = torch.randn(shape, dtype=dtype, device=DEVICE)
    dy = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype, device=DEVICE)
    wanted = outputs_and_gradient(swiglu_reference, gate_up, dy)
    for found, expected in zip((op.launch_forward(gate_up), op.launch_backward(dy, gate_up)), wanted, strict=True):
        assert (found.double() - expected).norm() <= tolerance * expected.norm()


def test_the_op_compiles_without_a_break():
    gate_up = torch.randn(4, 6, requires_grad=True)
    y = torch.compile(op.swiglu, fullgraph=True, backend="aot_eager")(gate_up)
    found = torch.autograd.grad(y.sum(), gate_up)
    torch.testing.assert_close(found, torch.autograd.grad(swiglu_reference(gate_up).sum(), gate_up))
