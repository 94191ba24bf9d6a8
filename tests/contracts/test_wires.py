"""What every registered wire promises, laid into a tiny stack in float64."""

import pytest
import torch

from components.models.stack import Zone, flatten
from components.parameters import owned_parameters
from tests.contracts.parts import DIM, assert_parameters_counted_declared_and_trained, built, config, names

STEPS = flatten(("trunk",), {"trunk": Zone(pattern=("gdn", "mla"), loops=2)})
ROWS, LENGTH = 2, 5


@pytest.fixture(params=names("wire"))
def name(request):
    return request.param


def wire(name: str, move: float = 0.1):
    """The example, its parameters away from their initial values."""
    part, generator = built("wire", name, dim=DIM, steps=STEPS), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter += move * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    return part


def passed(part, x_BTD: torch.Tensor) -> torch.Tensor:
    """A stream led past every step, where a mixer answers with the tanh of its input and the stream grows by it."""
    state = {}
    for step in STEPS:
        x_BTD = part.before(x_BTD, step, state)
        added = part.mixer_input(step)
        x_BTD = x_BTD + (x_BTD if added is None else x_BTD + added).tanh()
        x_BTD = part.after(x_BTD, step, state)
    return x_BTD


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_wire_keeps_the_shape_and_trains_every_parameter_it_counts(name):
    part = wire(name)
    y = passed(part, inputs())
    assert y.shape == (ROWS, LENGTH, DIM)
    (y * inputs()).sum().backward()
    assert_parameters_counted_declared_and_trained(part, config("wire", name).config.parameters(DIM, STEPS))
    assert {owned.role.name for owned in owned_parameters(part)} <= {"scalar"}  # no matrix products beside blocks


def test_a_wire_treats_each_token_alone(name):
    part, x = wire(name), inputs()
    other = x.clone()
    other[0, 3] += 1.0
    changed = (passed(part, other) - passed(part, x)).abs().sum(-1) > 1e-12
    assert changed.nonzero().tolist() == [[0, 3]]


def test_a_wire_carries_nothing_from_one_pass_to_the_next(name):
    part = wire(name)
    first = passed(part, inputs())
    passed(part, -inputs())
    assert torch.equal(passed(part, inputs()), first)
