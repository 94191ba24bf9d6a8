"""The expert pool: routing against loops over tokens and experts, balance, alignment, roles."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from components.parameters import owned_parameters
from tests.contracts.parts import DIM, built, config, context

ROWS, LENGTH, EXPERTS = 2, 12, 4


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def swarm(bias_E: tuple[float, ...] = (0.0,) * EXPERTS, **fields):
    """The example with other fields and a routing bias."""
    part = built("ffn", "swarm", dim=DIM, branches=4)
    part.config = replace(part.config, **fields)
    part.bias_E.copy_(torch.tensor(bias_E))
    return part


def by_loops(part, x_BTD: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    c, experts, rows = part.config, part.pool.experts, []
    for x_D in x_BTD.flatten(0, 1):
        logits_E = part.router.weight @ x_D
        p_E = (logits_E + part.bias_E if c.bias_in == "logits" else logits_E).softmax(-1)
        rank_E = p_E + part.bias_E if c.bias_in == "selection" else p_E
        chosen = rank_E.topk(c.top_k).indices
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            gate, up = (x_D @ experts.w13_EDF[e]).chunk(2)
            y_D = y_D + p_E[e] / p_E[chosen].sum() * ((F.silu(gate) * up) @ experts.w2_EFD[e])
        rows.append(y_D)
    return torch.stack(rows).view_as(x_BTD)


@pytest.mark.parametrize("bias_in", ["logits", "selection"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_loops_over_tokens_and_experts(bias_in, top_k):
    found = []
    for function in (lambda part, x: part(x, context(ROWS, LENGTH))[0], by_loops):
        part, x = swarm((0.3, -0.2, 0.1, 0.0), bias_in=bias_in, top_k=top_k), inputs().requires_grad_()
        y = function(part, x)
        (y * inputs().flip(1)).sum().backward()
        found.append([y, x.grad, *(p.grad for p in part.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_a_bias_on_the_selection_does_not_weigh_and_one_on_the_logits_does():
    """With every expert chosen, only weights can differ."""
    plain = swarm(top_k=EXPERTS)(inputs(), context(ROWS, LENGTH))[0]
    biased = {
        where: swarm((1.0, 0.0, 0.0, -1.0), top_k=EXPERTS, bias_in=where)(inputs(), context(ROWS, LENGTH))[0]
        for where in ("selection", "logits")
    }
    torch.testing.assert_close(biased["selection"], plain, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(biased["logits"], plain)


@pytest.mark.parametrize("bias_in", ["logits", "selection"])
def test_balancing_evens_out_a_lopsided_router(bias_in):
    part = swarm(bias_in=bias_in, top_k=1, bias_speed=0.02)
    tilt = torch.zeros(EXPERTS, DIM, dtype=torch.float64)
    tilt[0] = 0.2
    part.router.weight.data += tilt
    x = inputs() + 0.5
    before = part(x, context(ROWS, LENGTH))[1]["counts"]
    for _ in range(200):
        part.update_balance(part(x, context(ROWS, LENGTH))[1]["counts"])
    after = part(x, context(ROWS, LENGTH))[1]["counts"]
    assert before.max() - before.min() > 2 * (after.max() - after.min())


def test_the_auxiliary_loss_is_that_of_switch_transformer_and_least_at_even_load():
    part = swarm(balance="loss", loss_weight=0.5)
    aux = part(inputs(), context(ROWS, LENGTH))[1]
    p_NE = (inputs().flatten(0, 1) @ part.router.weight.T).softmax(-1)
    share_E = aux["counts"] / (ROWS * LENGTH * 2)
    torch.testing.assert_close(aux["balance_loss"], 0.5 * EXPERTS * (share_E * p_NE.mean(0)).sum())
    part.router.weight.data.zero_()
    even = part(inputs(), context(ROWS, LENGTH))[1]["balance_loss"]
    torch.testing.assert_close(even.item(), 0.5)


@pytest.mark.parametrize(("hidden", "width"), [(4101, 4096), (2734, 2720), (1708, 1696), (16, 16)])
def test_widths_are_rounded_down_to_a_multiple_of_16(hidden, width):
    assert replace(config("ffn", "swarm").config, hidden=hidden).width == width


@pytest.mark.parametrize("role", ["expert", "matrix"])
def test_experts_are_matrices_one_by_one_under_the_role_that_is_asked_for(role):
    component = config("ffn", "swarm")
    component = replace(component, config=replace(component.config, experts=2, expert_role=role))
    owned = {o.name: o.role for o in owned_parameters(component.build(dim=DIM, branches=4))}
    assert owned["router.weight"].name == "router"
    roles = [owned[f"pool.experts.{name}"] for name in ("w13_EDF", "w2_EFD")]
    assert {r.name for r in roles} == {role}
    assert [x.name for r in roles for x in r.logical] == ["0.w1", "0.w3", "1.w1", "1.w3", "0.w2", "1.w2"]
