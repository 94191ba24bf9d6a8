"""What the result file of a run says of its log."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from recipes import result
from recipes.result import CURVE_POINTS, read_result, write_result

STEPS, TOKENS = 450, 1000


@pytest.fixture
def written(tmp_path, monkeypatch) -> result.Result:
    """Of a run whose first tenth took ten times as long, that skipped step 100, and that was judged twice."""
    lines = []
    for step in range(1, STEPS + 1):
        timed = {"time/step": 10.0 if step <= STEPS // 10 else 1.0, "tps": 7.0 * step}
        lines.append(
            {"step": step, "loss": 9 - step / 100, "skipped_steps": int(step >= 100), "grad_norm": 1.0} | timed
        )
        if step in (90, STEPS):
            lines.append({"step": step, "validation/loss": 9 - step / 100})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(tmp_path)), training=SimpleNamespace(tokens_per_step=TOKENS)
    )
    progress = SimpleNamespace(step=STEPS, tokens=(STEPS - 1) * TOKENS, skipped_steps=1)
    monkeypatch.setattr(result, "_facts", lambda run: {"format": result.FORMAT})
    write_result(SimpleNamespace(job=job, progress=progress, model=SimpleNamespace(layers=[])))
    return read_result(tmp_path)


def test_a_validation_counts_the_tokens_that_were_trained_until_then_and_no_skipped_step(written):
    assert [line["tokens"] for line in written["validations"]] == [90 * TOKENS, (STEPS - 1) * TOKENS]


def test_summaries_leave_out_the_first_tenth_and_curves_keep_the_last_line(written):
    assert written["step_seconds"] == written["summary"]["time/step"]["mean"] == 1.0
    assert written["summary"]["tps"]["median"] == 7.0 * (STEPS // 10 + 1 + STEPS) / 2
    steps = written["curves"]["step"]
    assert steps[-1] == STEPS and len(steps) <= CURVE_POINTS and len({b - a for a, b in pairwise(steps)}) == 1
    assert written["curves"]["loss"] == [9 - step / 100 for step in steps] and "tps" not in written["curves"]
