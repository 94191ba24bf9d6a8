"""Steps of the joint optimizer on a GPU, plain and recorded."""

import pytest
import torch

from components.optimizers.roles import build_optimizers
from components.parallel.micro_batch import capture
from tests.optimizers.small_model import NORMUON, configs, initialised


def stepped(device, record=False, **table):
    """Weights after four clipped and measured steps, the last three of which may not wait for the device."""
    model = initialised().to(device)
    optimizer = build_optimizers(model, configs(matrix=table, expert=NORMUON | table))
    if record:
        optimizer.record(capture)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        torch.cuda.set_sync_debug_mode("error" if step and device == "cuda" else "default")
        optimizer.clip(1.0)
        optimizer.step(0.5, measure=True)
        optimizer.update_rms()
        torch.cuda.set_sync_debug_mode("default")
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


@pytest.mark.gpu
def test_a_step_on_cuda_moves_the_weights_as_on_the_cpu_and_never_waits_for_the_device():
    torch.testing.assert_close(stepped("cuda"), stepped("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_recorded_steps_are_bitwise_plain_ones_and_never_wait_for_the_device(ns_dtype):
    plain, recorded = (stepped("cuda", record, ns_dtype=ns_dtype, nesterov=True) for record in (False, True))
    assert torch.equal(plain, recorded)
