import pytest
import torch

from components.optimizers.roles import build_optimizers
from tests.optimizers.small_model import NORMUON, configs, initialised


def stepped(device):
    """Weights after four clipped and measured steps, the last three of which may not wait for the device."""
    model = initialised().to(device)
    optimizer = build_optimizers(model, configs(expert=NORMUON))
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
