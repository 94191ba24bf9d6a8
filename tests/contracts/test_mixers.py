"""What every registered mixer promises, run on its example in float64."""

import pytest
import torch

from tests.contracts.parts import DIM, assert_parameters_counted_declared_and_trained, built, config, context, names

MIXERS = names("mixer")
ROWS, LENGTH = 2, 21


@pytest.fixture(params=MIXERS)
def name(request):
    return request.param


def mixer(name: str):
    return built("mixer", name, dim=DIM, layer=1, branches=4)


def inputs(length: int = LENGTH) -> torch.Tensor:
    return torch.randn(ROWS, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_mixer_keeps_the_shape_and_trains_every_parameter_it_counts(name):
    part = mixer(name)
    y, _ = part(inputs(), context(ROWS, LENGTH))
    assert y.shape == (ROWS, LENGTH, DIM)
    (y * inputs()).sum().backward()
    assert_parameters_counted_declared_and_trained(part, config("mixer", name).config.parameters(DIM))


def test_a_mixer_begins_with_half_the_output_where_four_times_as_many_branches_share_the_stream(name):
    few, many = mixer(name), built("mixer", name, dim=DIM, layer=1, branches=16)
    y, half = (part(inputs(), context(ROWS, LENGTH))[0] for part in (few, many))
    torch.testing.assert_close(half, y / 2, rtol=1e-5, atol=1e-9)


def test_a_mixer_never_sees_a_later_token(name):
    part, x = mixer(name), inputs()
    y, _ = part(x, context(ROWS, LENGTH))
    for changed in (1, 7, LENGTH - 1):
        other = x.clone()
        other[:, changed:] += 1.0
        again, _ = part(other, context(ROWS, LENGTH))
        torch.testing.assert_close(again[:, :changed], y[:, :changed], rtol=0, atol=1e-12)
        assert not torch.allclose(again[:, changed], y[:, changed])


@pytest.mark.parametrize("prompt", [1, 2, 9])
def test_prefill_and_decode_give_what_the_full_forward_gives(name, prompt):
    part, x = mixer(name).eval(), inputs()
    full, _ = part(x, context(ROWS, LENGTH))
    cache = part.new_cache(ROWS, LENGTH + 3, torch.float64, torch.device("cpu"))
    position = context(ROWS, LENGTH).position_BT
    pieces = [slice(0, prompt), slice(prompt, prompt + 4), *(slice(i, i + 1) for i in range(prompt + 4, LENGTH))]
    with torch.no_grad():
        for piece in pieces:
            ctx = context(ROWS, LENGTH).__class__(position[:, piece])
            y, _ = part(x[:, piece], ctx, cache)
            # the recurrent state is fp32, whatever the inputs are
            torch.testing.assert_close(y, full[:, piece], rtol=1e-5, atol=1e-6)
    assert cache.lengths_B.tolist() == [LENGTH] * ROWS


def test_a_cache_keeps_the_chosen_rows_when_it_is_reordered(name):
    part, x = mixer(name).eval(), inputs()
    full, _ = part(x, context(ROWS, LENGTH))
    cache = part.new_cache(ROWS, LENGTH, torch.float64, torch.device("cpu"))
    position = context(ROWS, LENGTH).position_BT
    with torch.no_grad():
        part(x[:, :-1], context(ROWS, LENGTH).__class__(position[:, :-1]), cache)
        cache.reorder(torch.tensor([1, 0]))
        y, _ = part(x[[1, 0], -1:], context(ROWS, LENGTH).__class__(position[:, -1:]), cache)
    torch.testing.assert_close(y, full[[1, 0], -1:], rtol=1e-5, atol=1e-6)


def test_a_cache_forgets_what_is_taken_out_of_it_row_by_row(name):
    part, x = mixer(name).eval(), inputs()
    full, _ = part(x, context(ROWS, LENGTH))
    cache = part.new_cache(ROWS, LENGTH, torch.float64, torch.device("cpu"))
    cache.snapshots = 3  # of a recurrent state; others need none
    position_BT, kept_B = context(ROWS, LENGTH).position_BT, torch.tensor([12, 10])

    def taken(index_BT: torch.Tensor) -> torch.Tensor:
        rows_B1 = torch.arange(ROWS)[:, None]
        y_BTD, _ = part(x[rows_B1, index_BT], context(ROWS, LENGTH).__class__(index_BT), cache)
        torch.testing.assert_close(y_BTD, full[rows_B1, index_BT], rtol=1e-5, atol=1e-6)

    with torch.no_grad():
        for piece in (slice(0, 9), *(slice(i, i + 1) for i in range(9, 13))):
            taken(position_BT[:, piece])
        cache.truncate(kept_B)
        assert torch.equal(cache.lengths_B, kept_B)
        for more in range(4):
            taken((kept_B + more)[:, None])


def test_a_recurrent_cache_without_a_snapshot_says_so():
    cache = mixer("hymo_gdn").new_cache(1, LENGTH, torch.float64, torch.device("cpu"))
    cache.advance(cache.state_BHKV, cache.conv_BWC, 5)
    with pytest.raises(ValueError, match=r"no snapshot of a recurrent state at lengths \[3\]; raise `snapshots`"):
        cache.truncate(torch.tensor([3]))


def test_packed_documents_do_not_see_each_other_in_outputs_or_gradients(name):
    part = mixer(name)
    document = torch.tensor([[0] * 5 + [1] + [2] * (LENGTH - 6), [0] * LENGTH])
    x = inputs().requires_grad_()
    y, _ = part(x, context(ROWS, LENGTH, document))
    weights = inputs().flip(1)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    for row, start, stop in ((0, 0, 5), (0, 5, 6), (0, 6, LENGTH), (1, 0, LENGTH)):
        alone = x.detach()[row : row + 1, start:stop].clone().requires_grad_()
        apart, _ = part(alone, context(1, stop - start))
        torch.testing.assert_close(apart, y[row : row + 1, start:stop], rtol=1e-9, atol=1e-10)
        (own,) = torch.autograd.grad((apart * weights[row : row + 1, start:stop]).sum(), alone)
        torch.testing.assert_close(own, gradient[row : row + 1, start:stop], rtol=1e-8, atol=1e-9)


def test_the_same_name_and_seed_give_the_same_values_and_another_seed_others(name):
    first, again, other = mixer(name).state_dict(), mixer(name).state_dict(), None
    other = built("mixer", name, seed=1, dim=DIM, layer=1, branches=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
