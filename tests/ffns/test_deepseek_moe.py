"""The mixture of experts against a loop over experts, its counts and its balance."""

import pytest
import torch
import torch.nn.functional as F

import registry
from components.ffns.deepseek_moe import choice_counts, choose
from components.kernels.grouped_gemm.op import mixture_of_swiglu
from components.kernels.grouped_gemm.reference import mixture_of_swiglu_reference
from components.kernels.router_product import reference as router_product
from components.parallel.activation_checkpoint import apply_activation_checkpoint
from components.parallel.plan import exact_parameters
from components.parameters import initialise
from tests.contracts.parts import context
from tests.models.tiny import batch, model, tokens

TOKENS, EXPERTS, DIM, HIDDEN = 37, 6, 16, 8


def experts_case(dtype=torch.float64, seed: int = 0, busy: int = EXPERTS):
    """x, w13, w2, chosen experts (only the first `busy` are ever chosen), weights, counts."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, generator=g)
    w13 = torch.randn(EXPERTS, DIM, 2 * HIDDEN, dtype=torch.float64, generator=g) * DIM**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, DIM, dtype=torch.float64, generator=g) * HIDDEN**-0.5
    expert = torch.rand(TOKENS, busy, generator=g).topk(2, -1).indices
    weight = torch.rand(TOKENS, 2, dtype=torch.float64, generator=g)
    counts = torch.bincount(expert.flatten(), minlength=EXPERTS)
    return [t.to(dtype).requires_grad_() for t in (x, w13, w2)], expert, weight.to(dtype).requires_grad_(), counts


def gradients(output, leaves):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), leaves)


@pytest.mark.parametrize("busy", [EXPERTS, 3, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_sorted_dispatch_equals_the_loop_over_experts_also_with_idle_experts(dtype, tolerance, busy):
    (x, w13, w2), expert, weight, counts = experts_case(dtype, busy=busy)
    leaves = [x, w13, w2, weight]
    fast = mixture_of_swiglu(x, w13, w2, expert, weight, counts)
    fast_gradients = gradients(fast, leaves)
    (x, w13, w2), expert, weight, _ = experts_case(busy=busy)
    slow = mixture_of_swiglu_reference(x, w13, w2, expert, weight)
    torch.testing.assert_close(fast.double(), slow, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(fast_gradients, gradients(slow, [x, w13, w2, weight]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=10 * tolerance)


def moe(**changes):
    table = {"name": "deepseek_moe", "experts": 4, "top_k": 2, "hidden": 16, **changes}
    part = registry.parse_component("ffn", table).build(dim=DIM, branches=4)
    initialise(part, 0)
    part.reset_buffers()
    return part


def by_loops(part, x_TD: torch.Tensor) -> torch.Tensor:
    """Token by token: the bias has a say in who is chosen, and none in the weights."""
    c, rows = part.config, []
    for x_D in x_TD:
        score_E = (part.router.weight @ x_D).sigmoid()
        chosen = (score_E + part.bias_E).topk(c.top_k).indices
        weight_E = torch.zeros_like(score_E).index_copy(0, chosen, c.route_scale * score_E[chosen])
        every = torch.arange(c.experts)[None]
        routed = (x_D[None], part.experts.w13_EDF, part.experts.w2_EFD, every, weight_E[None] / score_E[chosen].sum())
        gate, up = (part.shared.gate_up @ x_D).chunk(2)
        rows.append(mixture_of_swiglu_reference(*routed)[0] + part.shared.down @ (F.silu(gate) * up))
    return torch.stack(rows)


def test_outputs_and_gradients_are_those_of_a_loop_over_tokens_also_where_the_bias_chooses():
    part, found = moe(route_scale=1.5, shared=2).double(), []
    part.bias_E.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    with torch.no_grad():
        part.router.weight.mul_(50)  # scores that differ by about as much as the biases
    for function in (lambda x: part(x[None], context(1, 9))[0][0], lambda x: by_loops(part, x)):
        x = torch.randn(9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        part.zero_grad()
        y = function(x)
        (y * x.detach().flip(0)).sum().backward()
        found.append([y, x.grad, *(p.grad.clone() for p in part.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_bias_changes_who_is_chosen_and_not_what_the_chosen_weigh():
    part, x = moe(top_k=1, shared=0), torch.randn(1, 9, DIM)
    part.bias_E.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    y, aux = part(x, context(1, 9))
    assert aux["counts"].tolist() == [0, 0, 9, 0]
    only = mixture_of_swiglu_reference(
        x[0], part.experts.w13_EDF, part.experts.w2_EFD, torch.full((9, 1), 2), torch.ones(9, 1)
    )
    torch.testing.assert_close(y[0], only, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("choices", [1, 2, 5])
def test_the_highest_scores_are_chosen_highest_first_and_the_first_of_equals(choices):
    score = torch.randint(-3, 4, (200, 5), generator=torch.Generator().manual_seed(0)).float()
    ranked = score.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(choose(score, choices), ranked[:, :choices])


def test_choices_are_counted_for_experts_that_nobody_chose_too():
    assert choice_counts(torch.tensor([[0, 3], [3, 1]]), 5).tolist() == [1, 1, 0, 2, 0]


def test_weights_of_the_chosen_sum_to_the_route_scale():
    part, x = moe(shared=0, route_scale=3.0), torch.randn(1, 9, DIM)
    plain = moe(shared=0)
    torch.testing.assert_close(part(x, context(1, 9))[0], 3.0 * plain(x, context(1, 9))[0], rtol=1e-4, atol=1e-6)


def test_capacity_drops_from_the_end_of_the_batch_in_training_only():
    part, x = moe(top_k=1, shared=0, capacity_factor=1.0), torch.randn(1, 8, DIM)
    part.bias_E.copy_(torch.tensor([5.0, 0.0, 0.0, 0.0]))  # everybody wants expert 0, which may take 8 / 4 tokens
    kept = part(x, context(1, 8))[0][0].abs().sum(-1) > 0
    assert kept.tolist() == [True, True] + [False] * 6
    part.eval()
    assert (part(x, context(1, 8))[0][0].abs().sum(-1) > 0).all()


def test_balance_moves_the_bias_against_the_average_load_by_one_step():
    part = moe(bias_speed=0.5, ema=0.02, tolerance=0.05)
    part.update_balance(torch.tensor([100, 104, 90, 106]))
    torch.testing.assert_close(part.load_E, torch.tensor([2.0, 2.08, 1.8, 2.12]))
    assert part.bias_E.tolist() == [0.0, 0.0, 0.5, -0.5]
    part.update_balance(torch.tensor([100, 100, 110, 90]))
    torch.testing.assert_close(
        part.load_E, 0.98 * torch.tensor([2.0, 2.08, 1.8, 2.12]) + 0.02 * torch.tensor([100.0, 100, 110, 90])
    )


def total_counts(lm, rows, micro_batches: int):
    parts = [lm(batch(part)).aux["layers.0.counts"] for part in rows.chunk(micro_batches)]
    return torch.stack(parts).sum(0).tolist()


def test_counts_are_those_of_the_whole_batch_under_accumulation_and_checkpointing():
    rows = tokens(rows=4)
    plain = total_counts(model(), rows, 1)
    assert sum(plain) == 4 * 24 * 2
    assert total_counts(model(), rows, 4) == plain
    for mode, option in (("full", "op"), ("selective", "op"), ("selective", "1")):
        lm = model()
        apply_activation_checkpoint(lm, mode, option)
        output = lm(batch(rows))
        before = output.aux["layers.0.counts"].clone()
        output.loss_sums.sum().backward()  # runs the blocks again
        assert output.aux["layers.0.counts"].tolist() == before.tolist() == plain


def test_the_routers_product_is_not_repeated_where_all_but_products_are_recomputed(monkeypatch):
    done, product = [], router_product.product
    monkeypatch.setattr(router_product, "product", lambda x, weight: done.append(x) or product(x, weight))
    for mode, option, repeats in (("full", "op", 2), ("selective", "op", 1)):
        done.clear()
        lm = model(dtype=torch.float32)
        apply_activation_checkpoint(lm, mode, option)
        loss = lm(batch(tokens())).loss_sums.sum()
        once = len(done)
        loss.backward()
        assert once and len(done) == repeats * once, mode


def test_a_forward_leaves_bias_and_load_alone():
    lm = model()
    lm(batch(tokens())).loss_sums.sum().backward()
    lm.eval()(batch(tokens(seed=1)))
    assert not lm.layers[0].ffn.bias_E.any() and not lm.layers[0].ffn.load_E.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"top_k": 9}, "top_k = 9"), ({"hidden": 12}, "multiple of 8"), ({"ema": 0.0}, "ema"), ({"shared": -1}, "shared")],
)
def test_impossible_experts_are_refused_in_one_sentence(changes, words):
    with pytest.raises(registry.RecipeError, match=words):
        moe(**changes)


def test_the_router_computes_in_fp32_unless_the_recipe_takes_that_back_and_chooses_alike_where_both_are_fp32():
    experts = {"name": "deepseek_moe", "experts": 4, "top_k": 2, "hidden": 16}
    exact, like_the_rest = (model(ffns={"experts": {**experts, "exact_router": on}}) for on in (True, False))
    weights = exact_parameters(exact)
    assert {exact.layers[0].ffn.router.weight, exact.layers[2].ffn.router.weight} <= weights
    assert not {p for p in exact_parameters(like_the_rest) if p.shape == (4, 32)}
    rows = batch(tokens())
    assert torch.equal(exact(rows).loss_sums, like_the_rest(rows).loss_sums)
