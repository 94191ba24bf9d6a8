"""The language model as a whole: causality of every head, documents kept apart, decoding, counts from the recipe."""

import math

import pytest
import torch

from components.losses.targets import IGNORE, targets
from components.parameters import initialise, owned_parameters
from registry import RecipeError
from tests.models.tiny import VOCAB, batch, config, model, tokens

LENGTH = 24


@pytest.mark.parametrize("changed", [5, 6, 17])
def test_no_head_sees_the_token_it_predicts_or_a_later_one(changed):
    """Depth d at i predicts token i + d + 1: changing token `changed` may move depth d's logits only from
    i = changed − d on, and does move them there."""
    lm, before = model(), tokens()
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % VOCAB
    for depth, (old, new) in enumerate(zip(lm.logits(batch(before)), lm.logits(batch(after)), strict=True)):
        first = changed - depth
        torch.testing.assert_close(new[:, :first], old[:, :first], rtol=0, atol=1e-12)
        assert not torch.allclose(new[:, first], old[:, first]), f"depth {depth} does not use token i + {depth}"


def test_each_head_predicts_the_token_its_depth_says():
    row = torch.arange(9)[None]
    for ahead in (1, 2, 3):
        found = targets(batch(row), ahead)[0].tolist()
        assert found == [*range(ahead, 9), *[IGNORE] * (ahead - 1)]


def test_no_target_of_any_head_crosses_a_document():
    row = torch.arange(9)[None]
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    expected = {1: [1, 2, -1, 4, 5, 6, -1, 8], 2: [2, -1, -1, 5, 6, -1, -1, -1], 3: [-1, -1, -1, 6, -1, -1, -1, -1]}
    for ahead, wanted in expected.items():
        found = targets(batch(row, document), ahead)[0]
        assert torch.where(found == IGNORE, -1, found).tolist() == wanted


def test_packed_documents_give_the_losses_and_gradients_of_separate_ones():
    lm, row = model(), tokens(rows=1)
    cut = 10
    document = torch.tensor([[0] * cut + [1] * (LENGTH + 1 - cut)])
    lm(batch(row, document)).loss_sums.sum().backward()
    packed = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    apart = [lm(batch(part)) for part in (row[:, :cut], row[:, cut:])]
    sum(output.loss_sums.sum() for output in apart).backward()
    joined = lm(batch(row, document))
    torch.testing.assert_close(joined.loss_sums, apart[0].loss_sums + apart[1].loss_sums, rtol=1e-10, atol=0)
    assert torch.equal(joined.target_counts, apart[0].target_counts + apart[1].target_counts)
    for name, p in lm.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_greedy_decoding_equals_the_argmax_of_the_full_forward_at_every_position():
    lm, row = model(dtype=torch.float32).eval(), tokens()
    with torch.no_grad():
        full = lm.logits(batch(row))[0].argmax(-1)
        caches = lm.new_caches(2, LENGTH, torch.float32)
        decoded = [lm.extend(row[:, i : i + 1], caches).argmax(-1) for i in range(LENGTH)]
    assert torch.equal(torch.stack(decoded, 1), full)


def test_the_initial_loss_is_that_of_a_uniform_guess():
    output = model()(batch(tokens()))
    losses = output.loss_sums / output.target_counts
    assert (losses - math.log(VOCAB)).abs().max() < 0.1


def test_the_embedding_is_trained_from_both_ends():
    lm = model()
    row = torch.zeros(1, LENGTH + 1, dtype=torch.int64)
    row[0, 3] = 7  # a token that is an input once
    lm(batch(row)).loss_sums[0].backward()
    assert lm.embedding.grad[7].abs().max() > 1e-6 and lm.embedding.grad[VOCAB - 1].abs().max() > 1e-6


def test_every_parameter_has_one_role_and_its_gradient():
    lm = model()
    lm(batch(tokens())).loss_sums.sum().backward()
    owned = list(owned_parameters(lm))
    assert {id(o.parameter) for o in owned} == {id(p) for p in lm.parameters()}
    assert all(o.parameter.grad is not None and o.parameter.grad.any() for o in owned)
    logical = [o.logical_name(piece) for o in owned for piece in o.role.logical]
    assert len(logical) == len(set(logical))


def test_initial_values_do_not_depend_on_layers_that_an_ablation_changes():
    """The same logical name has the same values, whatever else the model holds."""
    base = dict(model().named_parameters())
    deeper = dict(model(zones={"trunk": {"pattern": ["mla", "gdn"], "repeat": 3}}, mtp=None).named_parameters())
    residual = ("out", "w2_EFD", "down", "in_skip")  # scaled by depth, on purpose
    same = [n for n in base if n in deeper and not n.endswith(residual)]
    assert len(same) > 20 and all(torch.equal(base[n], deeper[n]) for n in same)


def test_parameters_counted_from_the_recipe_are_the_models():
    component = config()
    table = component.config.parameter_table()
    assert sum(stored for stored, _ in table.values()) == sum(p.numel() for p in component.build().parameters())


def test_a_looped_zone_runs_the_same_layers_again_and_counts_their_experts_over_all_loops():
    zones = {"trunk": {"pattern": ["mla", "gdn"], "loops": 3}}
    lm = model(zones=zones)
    assert len(lm.layers) == 2 and [s.layer for s in lm.steps] == [0, 1] * 3
    output = lm(batch(tokens()))
    assert output.aux["layers.0.counts"].sum() == 3 * 2 * LENGTH * 2  # loops x rows x length x top_k
    assert sum(s for s, _ in lm.config.parameter_table().values()) == sum(p.numel() for p in lm.parameters())


@pytest.mark.parametrize("where", ["zone", "model"])
def test_a_shared_part_exists_once_and_is_named_once(where):
    zone = {"pattern": ["mla", "gdn"], "repeat": 2}
    changes = {"share": ["experts"]} if where == "model" else {}
    zone |= {"share": ["experts"]} if where == "zone" else {}
    lm = model(zones={"trunk": zone}, **changes)
    assert lm.layers[0].ffn is lm.layers[2].ffn and lm.layers[0].mixer is not lm.layers[2].mixer
    assert sum(s for s, _ in lm.config.parameter_table().values()) == sum(p.numel() for p in lm.parameters())
    names = [o.name for o in owned_parameters(lm) if "w13" in o.name]
    assert len(names) == 1 and names[0].startswith("shared.")


def test_every_dangling_label_and_misfit_is_reported_at_once():
    with pytest.raises(RecipeError) as error:
        config(
            dim=36,
            order=["trnk"],
            blocks={"gdn": {"mixer": "gnd"}, "mla": {"mixer": "mla", "ffn": "expert"}},
        )
    text = str(error.value)
    assert 'no zone named "trnk". Did you mean "trunk"?' in text
    assert 'no mixer label named "gnd". Did you mean "gdn"?' in text
    assert 'no ffn label named "expert". Did you mean "experts"?' in text
    assert "dim = 36 must be a multiple of 8" in text


def test_initialise_refuses_a_parameter_nobody_declared():
    lm = model()
    lm.layers[0].mixer.stray = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="stray"):
        initialise(lm, 0)
