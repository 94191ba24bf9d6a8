"""Chimera, Universal Swarm and ghost attention as whole models: wires, loops, shared parts, causality, decoding."""

import math

import pytest
import torch

from components.interfaces import Context
from components.mixers.cache import BorrowingCache
from registry import RecipeError
from tests.models.families import CHIMERA, FAMILIES, GHOST, SWARM, WIRES
from tests.models.tiny import VOCAB, batch, config, model, tokens

LENGTH = 24


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def moved(**table):
    """The model with every parameter away from its initial value, so that no factor of 0 or 1 hides a mistake."""
    lm, generator = model(**table), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    return lm


def logits(lm) -> torch.Tensor:
    return lm.logits(batch(tokens()))[0]


def without(table: dict, *wires: str) -> dict:
    return table | {"wires": {label: wire for label, wire in table["wires"].items() if label not in wires}}


# What every family promises ---------------------------------------------------------------------------


def test_no_position_sees_a_later_token(family):
    lm, before = moved(**family), tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % VOCAB
    old, new = (lm.logits(batch(x))[0] for x in (before, after))
    torch.testing.assert_close(new[:, :9], old[:, :9], rtol=0, atol=1e-11)
    assert not torch.allclose(new[:, 9], old[:, 9])


def test_packed_documents_give_the_losses_of_separate_ones(family):
    lm, row, cut = moved(**family), tokens(rows=1), 10
    document = torch.tensor([[0] * cut + [1] * (LENGTH + 1 - cut)])
    joined = lm(batch(row, document)).loss_sums
    apart = sum(lm(batch(part)).loss_sums for part in (row[:, :cut], row[:, cut:]))
    torch.testing.assert_close(joined, apart, rtol=1e-10, atol=0)


def test_decoding_gives_the_full_forwards_logits(family):
    lm, row = moved(**family).eval(), tokens()
    with torch.no_grad():
        full = lm.logits(batch(row))[0]
        caches = lm.new_caches(2, LENGTH, torch.float64)
        pieces = [slice(0, 7), slice(7, 10), *(slice(i, i + 1) for i in range(10, LENGTH))]
        for piece in pieces:
            found = lm.extend(row[:, piece], caches)
            torch.testing.assert_close(
                found, full[:, piece.stop - 1], rtol=1e-4, atol=1e-5
            )  # recurrent states are fp32


def test_the_recipe_counts_the_parameters_of_the_model(family):
    lm, table = model(**family), config(**family).config.parameter_table()
    assert sum(stored for stored, _ in table.values()) == sum(p.numel() for p in lm.parameters())


def test_a_gradient_reaches_every_parameter(family):
    lm = moved(**family)
    lm(batch(tokens())).loss_sums.sum().backward()
    assert not [name for name, p in lm.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("part", ["block", "mixer", "ffn"])
def test_recomputation_changes_neither_losses_nor_gradients(family, part):
    plain, again = moved(**family), moved(**family)
    for layer in again.layers:
        layer.recompute = {part: {}}
    for lm in (plain, again):
        output = lm(batch(tokens()))
        output.loss_sums.sum().backward()
        assert not [name for name, value in output.aux.items() if value.requires_grad]
    for (name, ours), theirs in zip(again.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_the_initial_loss_is_that_of_a_uniform_guess(family):
    output = model(**family)(batch(tokens()))
    assert abs(output.loss_sums / output.target_counts - math.log(VOCAB)) < 0.1


# Wires ------------------------------------------------------------------------------------------------


def mixer_inputs(lm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each step's block and its mixer are given."""
    streams, inputs = [], []
    for layer in lm.layers:
        layer.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
        layer.mixer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    logits(lm)
    return list(zip(streams, inputs, strict=True))


@pytest.mark.parametrize("table", [CHIMERA, SWARM], ids=["chimera", "swarm"])
def test_layer_ids_change_the_inputs_of_recurrent_mixers_in_the_looped_zone_and_nothing_else(table):
    lm = moved(**table)
    ids_LPD = lm.wires["layer_id"].id_LPD
    for step, (x_BTD, h_BTD) in zip(lm.steps, mixer_inputs(lm), strict=True):
        told = step.zone == "top" and step.block == "gdn"
        expected = lm.layers[step.layer].mixer_norm(x_BTD)
        expected = expected + ids_LPD[step.loop, step.place] if told else expected
        assert torch.equal(h_BTD, expected), step


def test_an_id_that_no_block_is_told_has_no_effect():
    lm = moved(**CHIMERA)
    before = logits(lm)
    with torch.no_grad():
        lm.wires["layer_id"].id_LPD[:, 1] += 1.0  # the attention layer's
    assert torch.equal(logits(lm), before)


def test_layer_ids_can_go_into_the_residual_stream_instead():
    wires = WIRES | {"layer_id": WIRES["layer_id"] | {"into": "residual"}}
    lm, told = moved(**CHIMERA | {"wires": wires}), moved(**CHIMERA)
    for step, (x_BTD, h_BTD) in zip(lm.steps, mixer_inputs(lm), strict=True):
        assert torch.equal(h_BTD, lm.layers[step.layer].mixer_norm(x_BTD)), step
    assert not torch.allclose(logits(lm), logits(told))


@pytest.mark.parametrize("wire", ["x0", "layer_id"])
def test_x0_injection_and_layer_ids_change_nothing_at_their_initial_values(wire):
    assert torch.equal(logits(model(**CHIMERA)), logits(model(**without(CHIMERA, wire))))


def test_skips_change_nothing_where_their_initial_value_is_zero():
    silent = CHIMERA | {"wires": WIRES | {"skips": {"name": "unet_skips", "initial": 0.0}}}
    assert torch.equal(logits(model(**silent)), logits(model(**without(CHIMERA, "skips"))))
    assert not torch.allclose(logits(model(**CHIMERA)), logits(model(**without(CHIMERA, "skips"))))


@pytest.mark.parametrize("made", [model, moved])
def test_the_stack_computes_the_documents_equations_step_by_step(made):
    lm, row = made(**CHIMERA), tokens()
    position = torch.arange(LENGTH).expand(2, LENGTH)
    x0 = x = torch.nn.functional.rms_norm(lm.embedding[row[:, :-1]], (32,), eps=1e-6)
    skips, ids, scale = lm.wires["skips"].weight_SD, lm.wires["layer_id"].id_LPD, lm.wires["x0"].scale_S
    stored, order = [], [(0, None), (1, None), (2, 0), (3, 0), (2, 1), (3, 1)]  # layer and loop of each virtual layer
    for v, (layer, loop) in enumerate(order):
        block = lm.layers[layer]
        x = x + scale[v] * x0
        h = torch.nn.functional.rms_norm(x, (32,), eps=1e-6)
        h = h + ids[loop, 0] if layer == 2 else h
        x = block.residual[0] * x + block.mixer(h, Context(position))[0]
        x = block.residual[1] * x + block.ffn(torch.nn.functional.rms_norm(x, (32,), eps=1e-6), None)[0]
        x = x + skips[5 - v] * stored[5 - v] if v >= 3 else x
        stored.append(x)
    expected = torch.nn.functional.rms_norm(x, (32,), eps=1e-6) @ lm.embedding.T
    torch.testing.assert_close(logits(lm), expected, rtol=1e-10, atol=1e-12)


def test_a_wire_is_taken_away_by_the_name_none():
    table = CHIMERA | {"wires": WIRES | {"x0": {"name": "none"}}}
    assert torch.equal(logits(model(**table)), logits(model(**without(CHIMERA, "x0"))))


def test_a_wire_that_cannot_lie_in_the_stack_is_refused():
    wires = {"layer_id": {"name": "layer_id_gate", "zone": "tip", "blocks": ["gdn"]}}
    with pytest.raises(RecipeError, match=r'no zone in order named "tip"\. Did you mean "top"'):
        config(**CHIMERA | {"wires": wires})
    wires = {"layer_id": {"name": "layer_id_gate", "zone": "top", "blocks": ["gnd"]}}
    with pytest.raises(RecipeError, match=r'no block in zone top named "gnd"\. Did you mean "gdn"'):
        config(**CHIMERA | {"wires": wires})


# Ghost attention --------------------------------------------------------------------------------------


def test_only_the_lending_layer_stores_keys():
    lm = model(**GHOST)
    caches = lm.new_caches(2, LENGTH, torch.float64)
    for step, cache in zip(lm.steps, caches, strict=True):
        assert isinstance(cache, BorrowingCache) == (step.block == "ghost")
    lm.extend(tokens()[:, :5], caches)
    held = [value for cache in caches for value in vars(cache).values() if isinstance(value, torch.Tensor)]
    borrowed = [v for cache in caches if isinstance(cache, BorrowingCache) for v in vars(cache).values()]
    assert all(value.shape == (2,) for value in borrowed) and len(held) > len(borrowed)
    numbers = [lm.config.mixers[lm.config.blocks[s.block].mixer].config.cache_numbers() for s in lm.steps]
    assert numbers == [0, 2 * 2 * 8, 0, 0, 0]


def test_borrowing_layers_have_no_key_or_value_weights_and_train_the_lenders():
    lm = moved(**GHOST)
    assert lm.layers[2].mixer.qkv.shape[0] == 4 * 8 < lm.layers[1].mixer.qkv.shape[0]
    lm(batch(tokens())).loss_sums.sum().backward()
    with_readers = lm.layers[1].mixer.qkv.grad[4 * 8 :].clone()
    lm.zero_grad()
    for layer in (2, 4):
        torch.nn.init.zeros_(lm.layers[layer].mixer.out)
    lm(batch(tokens())).loss_sums.sum().backward()
    assert not torch.allclose(lm.layers[1].mixer.qkv.grad[4 * 8 :], with_readers)


def test_borrowing_without_a_lender_of_the_same_heads_is_refused():
    zones = {"trunk": {"pattern": ["gdn", "ghost", "attention"]}}
    with pytest.raises(RecipeError, match="no layer before it lends"):
        config(**GHOST | {"zones": zones})
    wider = GHOST["mixers"] | {"ghost": GHOST["mixers"]["ghost"] | {"head_dim": 16}}
    with pytest.raises(RecipeError, match=r"borrows keys and values of \(heads, width\) \(2, 16\), but the layer"):
        config(**GHOST | {"mixers": wider})


# The shared pool --------------------------------------------------------------------------------------


def test_layers_share_one_pool_and_have_a_router_and_a_bias_each():
    lm = model(**SWARM)
    first, second = lm.layers[2].ffn, lm.layers[3].ffn
    assert first.pool is second.pool and first.router is not second.router
    names = [name for name, _ in lm.named_parameters() if "w13" in name or "router" in name]
    assert names == [
        "shared.swarm_experts.experts.w13_EDF",
        "layers.2.ffn.router.weight",
        "layers.3.ffn.router.weight",
    ]
    lm.update_balance({"layers.2.counts": torch.tensor([5, 1, 1, 1]), "layers.3.counts": torch.tensor([1, 1, 1, 5])})
    assert first.bias_E.tolist() == pytest.approx([-0.001, 0.001, 0.001, 0.001])
    assert second.bias_E.tolist() == pytest.approx([0.001, 0.001, 0.001, -0.001])


def test_experts_by_layer_are_the_same_module_unshared():
    zones = SWARM["zones"] | {"swarm": {"pattern": SWARM["zones"]["swarm"]["pattern"]}}
    lm = moved(**SWARM | {"zones": zones})
    assert lm.layers[2].ffn.pool is not lm.layers[3].ffn.pool
    table = config(**SWARM | {"zones": zones}).config.parameter_table()
    assert sum(stored for stored, _ in table.values()) == sum(p.numel() for p in lm.parameters())


def test_of_a_shared_pool_a_token_meets_at_most_its_choices_in_every_layer():
    table = config(**SWARM).config.parameter_table()
    pool, expert = table["shared.swarm_experts"], 3 * 32 * 16
    assert pool == (4 * expert, 4 * expert)  # two layers, two choices each
    single = SWARM["ffns"]["experts"] | {"top_k": 1}
    table = config(**SWARM | {"ffns": SWARM["ffns"] | {"experts": single}}).config.parameter_table()
    assert table["shared.swarm_experts"] == (4 * expert, 2 * expert)
    assert table["layers.2.ffn"] == (4 * 32, 4 * 32)  # the router


def test_an_auxiliary_loss_moves_the_router_but_not_the_reported_loss():
    ffns = {weight: SWARM["ffns"] | {"experts": SWARM["ffns"]["experts"]} for weight in (0.0, 10.0)}
    for weight, table in ffns.items():
        table["experts"] = table["experts"] | {"balance": "loss", "loss_weight": weight}
    losses, gradients = [], []
    for table in ffns.values():
        lm = moved(**SWARM | {"ffns": table})
        output = lm(batch(tokens()))
        output.loss_sums.sum().backward()
        losses.append(output.loss_sums)
        gradients.append(lm.layers[2].ffn.router.weight.grad)
        assert set(output.aux) == {"layers.2.counts", "layers.3.counts"}
        lm.update_balance(output.aux)
        assert not lm.layers[2].ffn.bias_E.any()
    assert torch.equal(*losses) and not torch.allclose(*gradients)
