"""The gradient of a joint projection, of which pieces were rotated: the Triton form against the pieces one by one."""

import pytest
import torch

from components.kernels.rotation import op
from components.kernels.rotation.reference import joint_gradient_reference
from components.layers.rotary import Angles, rotary_angles
from tests.kernels.recording import recorded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernel runs on either
# Rows, heads and head width of the first and second piece, width of the third, features that rotate of a head.
SIZES = {
    "as in the primary": (2, 9, 10, 10, 32, 320, 8),
    "whole heads rotate": (1, 3, 2, 2, 8, 16, 8),
    "odd sizes": (1, 17, 3, 5, 21, 37, 6),
    "one pair, one row": (1, 1, 1, 2, 3, 1, 2),
    "heads wider than a tile": (1, 2, 2, 1, 300, 5, 10),
    "nothing rotates": (2, 9, 10, 3, 7, 33, 0),
}
CASES = pytest.mark.parametrize("case", SIZES)


def gradients(case: str, dtype: torch.dtype, device: str = DEVICE) -> list:
    """The arguments of the op."""
    B, T, first, second, K, third, turned = SIZES[case]
    pieces = [torch.randn(B, T, width, device=device).to(dtype) for width in (first * K, second * K, third)]
    return [*pieces, *(some_angles(B, T, turned, device) if turned else (None, None)), K]


def some_angles(B: int, T: int, R: int, device: str = DEVICE) -> Angles:
    return rotary_angles(torch.arange(B * T, device=device).view(B, T) * 7 % 300, R, 100.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # Triton's interpreter cuts bfloat16 off
@CASES
def test_the_triton_form_rounds_as_the_pieces_do_one_by_one(case, dtype):
    arguments = gradients(case, dtype)
    assert op.launch(*arguments).equal(joint_gradient_reference(*arguments))


@CASES
def test_fp32_pieces_are_turned_as_in_float64(case):
    first, second, third, *rest = gradients(case, torch.float32)
    expected = joint_gradient_reference(first.double(), second.double(), third.double(), *rest)
    torch.testing.assert_close(op.launch(first, second, third, *rest).double(), expected, rtol=0, atol=2e-6)


def test_pieces_may_lie_apart_or_be_one_number_everywhere():
    first, second, third, *rest = gradients("as in the primary", torch.float32)
    expected = op.launch(first, second, torch.ones_like(third), *rest)
    wide = torch.cat([second, first], -1)
    between_rows, between_columns = wide[..., first.shape[-1] :], second.mT.contiguous().mT
    one = torch.ones((), device=DEVICE).expand_as(third)
    assert op.launch(between_rows, between_columns, one, *rest).equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_triton_form_is_exact_at_the_primarys_size_and_in_a_recording(dtype):
    first, second, third = (torch.randn(4, 4096, 1280, device="cuda").to(dtype) for _ in range(3))
    for angles in (some_angles(4, 4096, 8), (None, None)):
        arguments = (first, second, third, *angles, 32)
        graph, (expected,), (found,) = recorded(lambda arguments=arguments: (op.joint_gradient(*arguments),))
        assert expected.equal(joint_gradient_reference(*arguments))
        graph.replay()
        assert found.equal(expected)


@CASES
def test_the_op_passes_pytorchs_own_checks(case):
    torch.library.opcheck(torch.ops.hymo.joint_gradient, gradients(case, torch.float64, "cpu"))
