"""An optimizer whose updates are recorded does what it does without, on any state it is given."""

import pytest
import torch

from tests.optimizers.recording import capture
from tests.optimizers.small_model import NORMUON, built, train

MUON = {"name": "muon", "lr": 0.02, "momentum": 0.9, "scale": "rms"}


def recorded(**tables):
    model, optimizer = built(**tables)
    optimizer.record(capture)
    return model, optimizer


def everything(model, optimizer):
    state = {f"{view.name} {name}": view.local for name, view in optimizer.state_views()}
    return dict(model.named_parameters()) | state


def same(one, other):
    found, expected = everything(*one), everything(*other)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("table", [NORMUON, NORMUON | {"ns_dtype": "bfloat16", "nesterov": True}, MUON])
def test_recorded_steps_are_bitwise_plain_ones_whatever_the_rate(table):
    tables = {"matrix": table, "expert": table}
    one, other = recorded(**tables), built(**tables)
    same(one, other)  # recording left no trace in the state
    for step in range(4):  # at another rate each
        train(*one, range(step, step + 1))
        train(*other, range(step, step + 1))
        same(one, other)


def test_a_recorded_optimizer_resumes_from_anothers_state():
    trained = built(expert=NORMUON)
    train(*trained, range(2))
    resumed = recorded(expert=NORMUON)
    train(*resumed, range(5, 7))  # what it had must not matter
    with torch.no_grad():
        for name, tensor in everything(*trained).items():
            everything(*resumed)[name].copy_(tensor)
    resumed[1].steps = trained[1].steps
    for pair in (trained, resumed):
        train(*pair, range(2, 4))
    same(resumed, trained)


def test_a_measured_step_of_a_recorded_optimizer_tells_what_a_plain_one_tells():
    found = []
    for model, optimizer in (recorded(expert=NORMUON), built(expert=NORMUON)):
        train(model, optimizer, range(1))
        model(torch.arange(6)[None]).logsumexp(-1).sum().backward()
        optimizer.step(0.5, measure=True)
        found.append(optimizer.update_rms())
    assert found[0] == found[1] and all(found[0].values())
    assert optimizer.seconds()["orthogonalising"] > 0


def test_weights_that_have_moved_are_found_where_they_are():
    one, other = recorded(), built()
    for model, optimizer in (one, other):
        train(model, optimizer, range(1))
    for parameter in one[0].parameters():
        parameter.data = parameter.data.clone()
    for model, optimizer in (one, other):
        train(model, optimizer, range(1, 3))
    same(one, other)
