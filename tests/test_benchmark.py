"""The benchmark's gate: what it takes for right, and the inputs it hands to a peer."""

import math

import pytest
import torch

from components.kernels.gated_delta_rule import gated_delta_rule
from components.kernels.gated_delta_rule.reference import log_decay
from recipes.benchmark import kernels
from recipes.benchmark.__main__ import main


def result(**errors):
    return kernels.Result("gated_delta_rule", "hymo", "ours", errors)


def test_an_error_over_its_limit_or_nan_is_not_right():
    assert result(o=4e-3, q=1.4e-2).right
    assert not result(o=6e-3, q=1e-3).right
    assert not result(o=1e-3, q=2e-2).right
    assert not result(o=1e-3, q=math.nan).right


def test_a_benchmark_that_does_not_exist_is_refused_with_those_that_do(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["stp"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == 'no benchmark named "stp". Did you mean "step"? Known: kernels, length, step\n'


def test_the_rule_on_decays_and_strengths_is_the_rule_on_the_gates_that_give_them():
    q, k, v = torch.randn(3, 1, 9, 2, 4, dtype=torch.float64)
    a, b = torch.randn(2, 1, 9, 2, dtype=torch.float64)
    A_log, dt_bias = torch.randn(2, 2, dtype=torch.float64)
    expected = gated_delta_rule(q, k, v, a, b, A_log, dt_bias)[0]
    torch.testing.assert_close(kernels.exact_from_decays(q, k, v, log_decay(a, A_log, dt_bias), b.sigmoid()), expected)
