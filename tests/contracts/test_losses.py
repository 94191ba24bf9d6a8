"""What every registered loss promises: the plain cross-entropy, its gradients included."""

import pytest
import torch

from components.kernels.linear_cross_entropy.reference import IGNORE, linear_cross_entropy_reference
from tests.contracts.parts import config, names


@pytest.mark.parametrize("softcap", [0.0, 15.0, 2.0])
@pytest.mark.parametrize("name", names("loss"))
def test_a_loss_equals_the_plain_cross_entropy_in_value_and_gradients(name, softcap):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, 25, 16, dtype=torch.float64, generator=generator)
    weight = torch.randn(40, 16, dtype=torch.float64, generator=generator)
    target = torch.randint(0, 40, (2, 25), generator=generator)
    target[0, 3:9] = IGNORE
    inputs = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected_inputs = [h.clone().requires_grad_(), weight.clone().requires_grad_()]

    loss = config("loss", name).build()(*inputs, target, softcap)
    expected = linear_cross_entropy_reference(
        expected_inputs[0].flatten(0, 1), expected_inputs[1], target.flatten(), softcap
    )

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (3.0 * loss).backward()
    (3.0 * expected).backward()
    for ours, theirs in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", names("loss"))
def test_a_loss_without_a_single_target_is_zero_with_zero_gradients(name):
    h = torch.randn(1, 5, 8, requires_grad=True)
    weight = torch.randn(12, 8, requires_grad=True)
    loss = config("loss", name).build()(h, weight, torch.full((1, 5), IGNORE), 15.0)
    loss.backward()
    assert loss.item() == 0 and not h.grad.any() and not weight.grad.any()
