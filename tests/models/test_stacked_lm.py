"""The language model as a whole: causality of every head, documents kept apart, decoding, counts from the recipe."""

import math

import pytest
import torch
import torch.nn.functional as F

from components.losses.targets import IGNORE, targets
from components.parameters import initialise, owned_parameters
from registry import RecipeError, parse_component
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


def test_a_depth_fuses_the_depth_before_with_the_embedding_of_the_token_it_sees():
    """fused_i = RMSNorm(h_i) + RMSNorm(emb_{i+d}); h'_i = fused_i + SwiGLU(fused_i); d counts from 1."""
    mtp = parse_component("mtp", {"name": "mtp", "depth": 2, "weights": [0.3, 0.1], "hidden": 8}).build(
        dim=4, branches=2
    )
    with torch.no_grad():
        for parameter in mtp.double().parameters():
            parameter.copy_(torch.randn_like(parameter))
    h, embedded = torch.randn(2, 1, 6, 4, dtype=torch.float64)  # embedded: of tokens 1 to 6
    expected = h
    for d, (depth, found) in enumerate(zip(mtp.depths, mtp(h, embedded, None), strict=True)):
        rows = []
        for i in range(6):
            ahead = embedded[0, i + d] if i + d < 6 else torch.zeros(4)
            fused = sum(
                F.rms_norm(x.double(), (4,), norm.weight, 1e-6)
                for x, norm in ((expected[0, i], depth.hidden_norm), (ahead, depth.embedding_norm))
            )
            gate, up = (depth.ffn.gate_up @ fused).chunk(2)
            rows.append(fused + depth.ffn.down @ (F.silu(gate) * up))
        expected = torch.stack(rows)[None]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("detached", [False, True])
def test_the_depths_teach_the_embedding_that_they_see_unless_it_is_detached(detached):
    table = {"name": "mtp", "depth": 2, "weights": [0.3, 0.1], "hidden": 8, "detach_embedding": detached}
    mtp = parse_component("mtp", table).build(dim=4, branches=2)
    initialise(mtp, 0)
    h, embedded = torch.randn(2, 1, 6, 4).unbind()
    h.requires_grad_(), embedded.requires_grad_()
    sum(found.square().sum() for found in mtp(h, embedded, None)).backward()
    assert h.grad.any() and (embedded.grad is None) is detached


@pytest.mark.parametrize("packed", [False, True])
def test_acceptance_counts_where_a_depth_guesses_what_the_main_head_guesses_later(packed):
    lm, row = model(seed=1), tokens(rows=2)
    with torch.no_grad():
        lm.embedding.mul_(20)  # guesses that follow the tokens, so that some agree and some do not
    document = torch.tensor([[0] * 10 + [1] * (LENGTH - 9), [0] * (LENGTH + 1)]) if packed else None
    guesses = [logits.argmax(-1) for logits in lm.logits(batch(row, document))]
    for d, agreed, tried in zip((1, 2), *lm.acceptance(batch(row, document)), strict=True):
        ends = LENGTH - d  # the main head at i + d, and the token after it, lie within the row
        both = [
            bool(guesses[d][b, i] == guesses[0][b, i + d])
            for b in range(2)
            for i in range(ends)
            if document is None or document[b, i] == document[b, i + d + 1]
        ]
        assert (agreed.item(), tried.item()) == (sum(both), len(both)) and 0 < sum(both) < len(both)


def test_the_gradient_norm_of_a_head_is_that_of_its_weighted_loss_at_the_stacks_output():
    lm, held = model(), []
    lm.layers[-1].register_forward_hook(lambda _, __, output: held.append(output[0]))
    found = lm.gradient_norms(batch(tokens()))
    held.clear()
    losses = lm(batch(tokens())).loss_sums * torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
    for loss, norm in zip(losses, found, strict=True):
        (gradient,) = torch.autograd.grad(loss, held, retain_graph=True)
        torch.testing.assert_close(norm, gradient.norm().float())


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
        for parameter in lm.parameters():
            parameter.mul_(4)  # so that positions matter to the logits
        full = lm.logits(batch(row))[0]
        caches = lm.new_caches(2, LENGTH, torch.float32)
        decoded = torch.stack([lm.extend(row[:, i : i + 1], caches) for i in range(LENGTH)], 1)
    assert torch.equal(decoded.argmax(-1), full.argmax(-1))
    torch.testing.assert_close(decoded, full, rtol=1e-4, atol=1e-4)


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


def test_a_shared_ffn_is_balanced_by_the_choices_of_all_its_layers():
    lm, counts = model(share=["experts"]), torch.tensor([[8, 2, 3, 3], [8, 2, 2, 4]])
    lm.update_balance({"layers.0.counts": counts[0], "layers.2.counts": counts[1]})
    ffn = lm.layers[0].ffn
    assert ffn is lm.layers[2].ffn
    torch.testing.assert_close(ffn.load_E, ffn.config.ema * counts.sum(0).double())


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
