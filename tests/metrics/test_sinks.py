"""Where metrics go: a line of JSON, TensorBoard, the console; also of a run that is resumed."""

import io
import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from components.metrics.sinks import ConsoleSink, JsonlSink, MetricLog, TensorBoardSink, duration

TRAINING = {"loss": 2.5, "grad_norm": 1.0, "tokens": 64, "tps": 1234.5, "tflops": 0.5, "mfu": None, "skipped_steps": 0}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_steps(sink, *steps):
    for step in steps:
        sink.log(step, {"loss": float(step)})
    sink.close()


def points(folder, tag):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_a_line_of_metrics_jsonl_is_one_object_with_the_step_first(tmp_path):
    JsonlSink(tmp_path / "m.jsonl").log(3, TRAINING | {"loss_mtp/1": 3.0, "lr/matrix": 0.02})
    text = (tmp_path / "m.jsonl").read_text()
    assert text.startswith('{"step": 3, "loss": 2.5, ') and text.endswith("}\n")
    assert json.loads(text) == {"step": 3, **TRAINING, "loss_mtp/1": 3.0, "lr/matrix": 0.02}


def test_a_line_is_on_disk_when_it_is_logged(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(1, TRAINING)
    assert len(lines(tmp_path / "m.jsonl")) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_no_number_is_null_in_json(tmp_path, value):
    JsonlSink(tmp_path / "m.jsonl").log(1, {"loss": value})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": None}]


def test_a_resumed_run_drops_lines_after_the_restored_step(tmp_path):
    log_steps(JsonlSink(tmp_path / "m.jsonl"), 1, 2, 3, 4)
    log_steps(JsonlSink(tmp_path / "m.jsonl", restored_step=2), 3, 4, 5)
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2, "loss": 1.0}', "\x00\x00\n", "[]\n"])
def test_a_last_line_that_was_cut_off_is_dropped(tmp_path, torn):
    log_steps(JsonlSink(tmp_path / "m.jsonl"), 1)
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write(torn)
    log_steps(JsonlSink(tmp_path / "m.jsonl", restored_step=2), 3)
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 3]


def test_tensorboard_has_torchtitans_tags_where_it_has_one(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.log(1, TRAINING | {"lr/matrix": 0.02, "validation/loss": 3.0})
    sink.text(1, "samples/0", "once upon a time")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {
        "loss_metrics/global_avg_loss",
        "grad_norm",
        "n_tokens_seen",
        "throughput(tps)",
        "tflops",
        "lr/matrix",
    } <= set(events.Tags()["scalars"])
    assert "mfu(%)" not in events.Tags()["scalars"]
    assert events.Tags()["tensors"] == ["samples/0/text_summary"]


def test_a_resumed_run_has_no_step_twice_in_tensorboard(tmp_path):
    log_steps(TensorBoardSink(tmp_path), 1, 2, 3, 4)
    log_steps(TensorBoardSink(tmp_path, restored_step=2), 3, 4, 5)
    assert points(tmp_path, "loss_metrics/global_avg_loss") == [(step, float(step)) for step in (1, 2, 3, 4, 5)]


def test_the_console_line_is_in_torchtitans_manner_with_the_time_that_is_left():
    stream = io.StringIO()
    sink = ConsoleSink(steps=100, stream=stream)
    sink.log(7, TRAINING | {"memory/reserved": 1.5, "memory/reserved_share": 12.25})
    assert stream.getvalue() == (
        "step:   7/100  loss:  2.5000  grad_norm:  1.0000  memory:  1.50GiB(12.25%)  tps: 1,234  tflops: 0.50  "
        "mfu: N/A  eta: 0s\n"
    )


def test_the_time_that_is_left_follows_from_the_steps_since_the_start(monkeypatch):
    """Of a run that goes on after step 60: 20 steps took 50 s."""
    clock, stream = iter((1000.0, 1050.0)), io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    ConsoleSink(steps=100, restored_step=60, stream=stream).log(80, TRAINING)
    assert stream.getvalue().endswith("eta: 50s\n")


def test_the_console_shows_a_loss_that_is_no_number_and_counts_skipped_steps():
    stream = io.StringIO()
    ConsoleSink(steps=10, stream=stream).log(1, TRAINING | {"loss": math.nan, "skipped_steps": 2})
    assert "loss:     nan" in stream.getvalue() and "skipped: 2" in stream.getvalue()


def test_the_console_shows_validation():
    stream = io.StringIO()
    ConsoleSink(steps=10, stream=stream).log(5, {"validation/loss": 2.0, "validation/ppl": 7.39, "validation/bpb": 0.8})
    assert stream.getvalue() == "step:  5/10  validate  loss:  2.0000  ppl: 7.39  bpb: 0.8000\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (41, "41s"), (725, "12m 05s"), (12_000, "3h 20m"), (446_400, "5d 04h")]
)
def test_durations_read_as_a_person_would_say_them(seconds, text):
    assert duration(seconds) == text


def test_only_rank_0_writes(tmp_path):
    log = MetricLog.open(tmp_path / "run", rank=1, steps=10)
    log.log(1, TRAINING)
    log.text(1, "samples/0", "text")
    log.close()
    assert not (tmp_path / "run").exists()


def test_rank_0_writes_to_all_sinks(tmp_path, capsys):
    log = MetricLog.open(tmp_path / "run", rank=0, steps=10)
    log.log(1, TRAINING)
    log.close()
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1
    assert points(tmp_path / "run" / "tb", "grad_norm") == [(1, 1.0)]
    assert "loss:  2.5000" in capsys.readouterr().out
