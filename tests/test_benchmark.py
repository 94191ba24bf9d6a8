"""The benchmark's gate: what it takes for right, and the inputs it hands to a peer."""

import dataclasses
import math
from types import SimpleNamespace

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


def test_a_table_names_the_errors_that_are_over_their_limits_and_leaves_out_what_was_not_measured(capsys):
    wrong = result(o=6e-3, q=1e-3, k=math.nan)
    table = [wrong, dataclasses.replace(result(o=4e-3), both_gpu=0.5)]
    kernels.print_table(table, {"copy_bytes": 1, "matmul_flops": 1})
    printed = capsys.readouterr().out
    assert "WRONG: o 6.0e-03, k nan" in printed
    assert "0.500" in printed
    assert printed.count("nan") == 1


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


def test_wall_times_are_medians_of_turns_and_a_kernel_that_was_not_timed_has_none(monkeypatch):
    asked = []
    times = {"ours": iter([3.0, 1.0, 2.0, 9.0, 1.5]), "fla": iter([8.0, 7.0, 6.0, 5.0, 4.0])}

    def wall_time(calls, seconds):
        asked.append(calls[0]())
        return next(times[asked[-1]])

    def provider(name):
        return lambda shape, seed: SimpleNamespace(both=lambda: name)

    monkeypatch.setattr(kernels, "wall_time", wall_time)
    results = [dataclasses.replace(result(), provider=name, both_gpu=1.0) for name in times] + [result()]
    results[-1] = dataclasses.replace(results[-1], provider="wrong")
    found = kernels.with_wall_times(results, {name: provider(name) for name in (*times, "wrong")}, 0.0)
    assert [r.both_wall for r in found[:2]] == [2.0, 6.0]
    assert math.isnan(found[2].both_wall)
    assert asked == ["ours", "fla"] * kernels.TURNS


def test_a_shape_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(SystemExit) as ended:
        kernels.kernels(shapes=("hymo", "hymoo"))
    assert str(ended.value).startswith('no shape named "hymoo". Did you mean "hymo"? Known: hymo, k128_v256')
    for name in kernels.SHAPES:
        assert name in kernels.kernels.__doc__
