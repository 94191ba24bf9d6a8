"""All roles as one optimizer: roles, refusals, state, measurements, clipping, rounded weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from components.optimizers.roles import build_optimizers, parameters_by_role
from components.parameters import Logical, Role, constant, rows, whole
from registry import RecipeError, parse_component
from tests.optimizers.small_model import ADAMW, NORMUON, built, configs, initialised, train


def test_every_parameter_is_in_exactly_one_role():
    model = initialised()
    groups = parameters_by_role(model)
    held = [id(owned.parameter) for members in groups.values() for owned in members]
    assert sorted(held) == sorted(map(id, model.parameters()))
    assert list(groups) == ["matrix", "expert", "embedding", "router", "scalar"]


def test_the_role_table_counts_tensors_and_parameters():
    model, optimizer = built()
    table = {
        row.role: (row.optimizer, row.learning_rate, row.tensors, row.parameters) for row in optimizer.role_table()
    }
    assert table["matrix"] == ("normuon", 0.02, 3, 11 * 7 + 7 * 6 + 7)
    assert table["expert"] == ("adamw", 1e-3, 1, 3 * 7 * 5)
    assert sum(row[-1] for row in table.values()) == sum(p.numel() for p in model.parameters())


def test_measured_steps_tell_how_long_they_took_once():
    _, optimizer = built()
    for measure in (True, False, True):
        optimizer.step(1.0, measure=measure)
        found = optimizer.seconds()
        assert (0 < found["orthogonalising"] < found["optimizer"]) == measure
    assert optimizer.seconds() == {"optimizer": 0, "orthogonalising": 0}


def test_an_undeclared_parameter_is_refused():
    model = initialised()
    model.mixer.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="declare every parameter with exactly one role"):
        build_optimizers(model, configs())


def test_a_shared_parameter_declared_in_two_roles_is_refused():
    model = initialised()
    model.head = nn.Module()
    model.head.weight = model.embedding
    model.head.roles = lambda: {"weight": whole("matrix", "weight", constant(0.0))}
    with pytest.raises(ValueError, match=r"embedding is shared with head.weight but declared 'embedding' here"):
        build_optimizers(model, configs())


@pytest.mark.parametrize("sizes", [{"in": 5, "skip": 5}, {"in": 6, "skip": 6}])
def test_logical_matrices_that_leave_a_gap_or_overlap_are_refused(sizes):
    model = initialised()
    declared = model.mixer.roles()
    model.mixer.roles = lambda: declared | {"folded": rows("matrix", sizes, constant(0.0))}
    with pytest.raises(ValueError, match=r"mixer.folded has 77 values .* must cover it exactly once"):
        build_optimizers(model, configs())


def test_a_role_with_parameters_but_no_optimizer_is_refused_and_an_empty_role_needs_none():
    present = configs()
    with pytest.raises(ValueError, match=r"\[optimizer.router\]: the model has 1 parameters of this role"):
        build_optimizers(initialised(), present | {"router": None})
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(2))
    model.roles = lambda: {"scale": Role("scalar", (Logical("scale", constant(1.0)),))}
    assert list(build_optimizers(model, {"scalar": present["scalar"]}).groups) == ["scalar"]


def test_a_misspelt_role_and_an_optimizer_outside_its_roles_are_refused():
    with pytest.raises(ValueError, match='Did you mean "router"'):
        build_optimizers(initialised(), configs() | {"routr": None})
    misdeclared = initialised()
    misdeclared.mixer.roles = lambda roles=misdeclared.mixer.roles: {
        n: replace(r, name="matrx") for n, r in roles().items()
    }
    with pytest.raises(ValueError, match=r'mixer\.\w+: no role named "matrx"\. Did you mean "matrix"'):
        build_optimizers(misdeclared, configs())
    with pytest.raises(ValueError, match=r"\[optimizer.embedding\]: normuon serves the roles matrix, expert only"):
        build_optimizers(initialised(), configs() | {"embedding": parse_component("optimizer", NORMUON)})


def test_a_model_on_the_meta_device_is_refused():
    with pytest.raises(ValueError, match="is on the meta device"):
        build_optimizers(initialised().to("meta"), configs())


@pytest.mark.parametrize(
    "table, message",
    [
        (ADAMW | {"betas": [0.9, 1.0]}, "betas must lie in"),
        (ADAMW | {"lr": -1.0}, "lr and weight_decay must be 0 or more"),
        (NORMUON | {"momentum": 1.0}, "momentum must lie in"),
        (NORMUON | {"beta2": -0.1}, "beta2 must lie in"),
        (NORMUON | {"distribution": "roundrobin"}, 'Did you mean "round_robin"'),
    ],
)
def test_an_impossible_optimizer_is_refused_in_one_sentence(table, message):
    with pytest.raises(RecipeError, match=message):
        parse_component("optimizer", table)


def test_adamw_equals_torch_and_treats_a_missing_gradient_as_zero():
    table = ADAMW | {"weight_decay": 0.3, "betas": [0.8, 0.9]}
    model, optimizer = built(expert=table)
    twin = initialised().experts.w1_EDF
    expected = torch.optim.AdamW([twin], lr=1e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3)
    for step in range(4):
        gradient = torch.randn(twin.shape) if step != 2 else None
        model.experts.w1_EDF.grad = gradient
        twin.grad = torch.zeros_like(twin) if gradient is None else gradient
        optimizer.step(1.0)
        expected.step()
    torch.testing.assert_close(model.experts.w1_EDF, twin, rtol=0, atol=0)


def test_the_measured_update_of_adamw_is_how_far_the_weights_moved():
    model, optimizer = built()
    for _ in range(3):
        before = model.experts.w1_EDF.detach().clone()
        model.experts.w1_EDF.grad = torch.randn_like(before)
        optimizer.step(0.5, measure=True)
    moved = (model.experts.w1_EDF - before).square().mean().sqrt()
    torch.testing.assert_close(optimizer.update_rms()["expert"], moved, rtol=1e-3, atol=0)


def bf16_weights(matrix: dict | None = None):
    model = initialised()
    optimizer = build_optimizers(model, configs(matrix=matrix), torch.bfloat16)
    optimizer.round_weights()
    return model, optimizer


def test_weights_rounded_to_bf16_are_its_values_after_every_step_and_not_those_of_fp32():
    model, optimizer = bf16_weights()
    plain, exact = built()
    for step in range(3):
        for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float())
            assert not torch.equal(weight, other)
            torch.testing.assert_close(weight, other, rtol=0.02, atol=1e-4)
        train(model, optimizer, range(step, step + 1))
        train(plain, exact, range(step, step + 1))
    assert all((view.local != view.local.bfloat16()).any() for _, view in optimizer.state_views())


def test_an_update_that_bf16_swallows_leaves_the_weight_alone_and_a_larger_one_moves_it():
    model, optimizer = bf16_weights()
    weight = model.mixer.gain  # AdamW's first update is the rate, 1e-3, whatever the gradient
    with torch.no_grad():
        weight.copy_(torch.tensor([1.0, -1.0, 0.125]))  # steps of bf16 below them: 2^-8, 2^-8, 2^-11
    weight.grad = torch.tensor([1.0, -1.0, 1.0])
    optimizer.step(1.0)
    assert weight.tolist() == [1.0, -1.0, 0.125 - 2**-10]


def test_the_clip_returns_the_joint_norm_and_scales_every_gradient():
    model, optimizer = built()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    joint = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    norm = optimizer.clip(1.0)
    assert norm.dtype == torch.float32 and norm.ndim == 0
    torch.testing.assert_close(norm, joint)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]).norm(), torch.ones(()))
    torch.testing.assert_close(optimizer.clip(5.0), torch.ones(()))
    torch.testing.assert_close(optimizer.clip(5.0), torch.ones(()), rtol=1e-5, atol=0)


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit():
    unbroken, optimizer = built(expert=NORMUON)
    train(unbroken, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in unbroken.state_dict().items()}
    state = {(name, view.name): view.local.clone() for name, view in optimizer.state_views()}
    train(unbroken, optimizer, range(3, 6))

    resumed, fresh = built(expert=NORMUON)
    resumed.load_state_dict(saved)
    for name, view in fresh.state_views():
        view.local.copy_(state.pop((name, view.name)))
    fresh.steps = 3
    train(resumed, fresh, range(3, 6))
    assert not state
    for name, weight in unbroken.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
