"""Sums in fp32 of gradients in any dtype, in every form."""

import pytest
import torch

from components.kernels.accumulate.op import accumulate, launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernel runs on either


def check(size, dtype, function):
    total, values = torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE).to(dtype)
    wanted = total + values.float()
    function(total, values)
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1,), (3, 5), (4096,), (70, 130)])
@pytest.mark.parametrize("function", [accumulate, launch])
def test_values_are_added_in_fp32_bit_for_bit(size, dtype, function):
    check(size, dtype, function)


@pytest.mark.gpu
def test_values_of_a_layers_experts_are_added_on_the_gpu():
    check((16, 896, 4608), torch.bfloat16, accumulate)


def test_values_that_do_not_lie_together_are_added_too():
    check((6, 4), torch.bfloat16, lambda total, values: accumulate(total, values.T.contiguous().T))
