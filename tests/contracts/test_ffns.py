"""What every registered FFN promises, run on its example in float64."""

import pytest
import torch

from tests.contracts.parts import DIM, assert_parameters_counted_declared_and_trained, built, config, context, names

ROWS, LENGTH = 2, 12


@pytest.fixture(params=names("ffn"))
def name(request):
    return request.param


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_an_ffn_keeps_the_shape_and_trains_every_parameter_it_counts(name):
    part = built("ffn", name, dim=DIM, branches=4)
    y, _ = part(inputs(), context(ROWS, LENGTH))
    assert y.shape == (ROWS, LENGTH, DIM)
    (y * inputs()).sum().backward()
    assert_parameters_counted_declared_and_trained(part, config("ffn", name).config.parameters(DIM))


def test_an_ffn_begins_with_half_the_output_where_four_times_as_many_branches_share_the_stream(name):
    y, half = (built("ffn", name, dim=DIM, branches=n)(inputs(), context(ROWS, LENGTH))[0] for n in (4, 16))
    torch.testing.assert_close(half, y / 2, rtol=1e-5, atol=1e-9)


def test_an_ffn_treats_each_token_alone(name):
    part, x = built("ffn", name, dim=DIM, branches=4), inputs()
    y, _ = part(x, context(ROWS, LENGTH))
    other = x.clone()
    other[0, 3] += 1.0
    again, _ = part(other, context(ROWS, LENGTH))
    changed = (again - y).abs().sum(-1) > 1e-12
    assert changed.nonzero().tolist() == [[0, 3]]


def test_an_ffns_statistics_carry_no_gradient(name):
    _, aux = built("ffn", name, dim=DIM, branches=4)(inputs().requires_grad_(), context(ROWS, LENGTH))
    assert not any(value.requires_grad for value in aux.values())
