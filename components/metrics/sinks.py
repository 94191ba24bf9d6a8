"""Where the numbers of a run go: the console, TensorBoard, metrics.jsonl. Only rank 0 writes.

One dictionary goes to all of them, by the keys of metrics.jsonl:

    training      step, loss (main head), loss_mtp/<depth>, loss_total, grad_norm, skipped_steps, tokens, tps, tflops,
                  mfu, lr/<role>, moe/<layer>/..., memory/..., time/...
    validation    validation/loss, validation/ppl, validation/bpb, validation/<source>/...

TensorBoard shows them under TorchTitan's tags where it has one (`TENSORBOARD_TAGS`), else under their own. None means
not available: null in JSON, N/A on the console, no point in TensorBoard. JSON has no NaN: a loss that is one is null.

A resumed run goes on in the same files: lines and points after the restored step are dropped, so that no step is there
twice. Every line is flushed when it is logged, so that a killed run lacks none before its last checkpoint.
"""

import json
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO, final

Value = float | int | None
Values = Mapping[str, Value]

TENSORBOARD_TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "tokens": "n_tokens_seen",
    "tps": "throughput(tps)",
    "mfu": "mfu(%)",
    "time/step": "time_metrics/end_to_end(s)",
    "time/data": "time_metrics/data_loading(s)",
    "time/data_share": "time_metrics/data_loading(%)",
    "memory/active": "memory/max_active(GiB)",
    "memory/active_share": "memory/max_active(%)",
    "memory/reserved": "memory/max_reserved(GiB)",
    "memory/reserved_share": "memory/max_reserved(%)",
    "memory/retries": "memory/num_alloc_retries",
    "memory/ooms": "memory/num_ooms",
    "validation/loss": "validation_metrics/loss",
}


class Sink(ABC):
    """Takes what is logged; `values` by the keys of metrics.jsonl, `step` the optimizer step they belong to."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None: ...

    @abstractmethod
    def text(self, step: int, tag: str, text: str) -> None:
        """A sample of text."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


@final
class MetricLog:
    """All sinks of a run; on ranks other than 0 it has none."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(
        cls, dump_folder: Path | str, *, rank: int, steps: int, restored_step: int = 0, enable_tensorboard: bool = True
    ) -> "MetricLog":
        """The log in `dump_folder` of a run of `steps` steps that goes on after `restored_step`."""
        folder = Path(dump_folder)
        if rank != 0:
            return cls([])
        folder.mkdir(parents=True, exist_ok=True)
        sinks: list[Sink] = [ConsoleSink(steps, restored_step), JsonlSink(folder / "metrics.jsonl", restored_step)]
        return cls([*sinks, TensorBoardSink(folder / "tb", restored_step)] if enable_tensorboard else sinks)

    def log(self, step: int, values: Values) -> None:
        for sink in self._sinks:
            sink.log(step, values)

    def text(self, step: int, tag: str, text: str) -> None:
        for sink in self._sinks:
            sink.text(step, tag, text)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


@final
class JsonlSink(Sink):
    """metrics.jsonl: one object a line, `step` first."""

    def __init__(self, path: Path, restored_step: int = 0) -> None:
        keep_up_to(path, restored_step)
        self._file = path.open("a")

    def log(self, step: int, values: Values) -> None:
        line = {"step": step} | {key: _json_number(value) for key, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def text(self, step: int, tag: str, text: str) -> None:
        """The file holds numbers only."""

    def close(self) -> None:
        self._file.close()


@final
class TensorBoardSink(Sink):
    """Event files under `folder`; a new one for each start, which purges later steps of those before."""

    def __init__(self, folder: Path, restored_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is wanted

        self._writer = SummaryWriter(str(folder), purge_step=restored_step + 1)

    def log(self, step: int, values: Values) -> None:
        for key, value in values.items():
            if value is not None:
                self._writer.add_scalar(TENSORBOARD_TAGS.get(key, key), value, step)
        self._writer.flush()

    def text(self, step: int, tag: str, text: str) -> None:
        self._writer.add_text(tag, text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@final
class ConsoleSink(Sink):
    """One line a log in TorchTitan's manner, with the time that is left."""

    def __init__(self, steps: int, restored_step: int = 0, stream: TextIO | None = None) -> None:
        self._steps, self._stream = steps, stream or sys.stdout
        self._start = (restored_step, time.monotonic())

    def log(self, step: int, values: Values) -> None:
        line = self._validation_line(values) if "validation/loss" in values else self._training_line(step, values)
        print(f"step: {step:>{len(str(self._steps))}}/{self._steps}  {line}", file=self._stream, flush=True)

    def text(self, step: int, tag: str, text: str) -> None:
        print(f"step: {step:>{len(str(self._steps))}}/{self._steps}  {tag}: {text!r}", file=self._stream, flush=True)

    def close(self) -> None:
        """Every line is out already."""

    def _training_line(self, step: int, values: Values) -> str:
        parts = [f"loss: {_shown(values.get('loss'), '7.4f')}", f"grad_norm: {_shown(values.get('grad_norm'), '7.4f')}"]
        if values.get("memory/reserved") is not None:
            share = _shown(values.get("memory/reserved_share"), ".2f")
            parts.append(f"memory: {_shown(values['memory/reserved'], '5.2f')}GiB({share}%)")
        parts += [
            f"tps: {_shown(values.get('tps'), ',.0f')}",
            f"tflops: {_shown(values.get('tflops'), ',.2f')}",
            f"mfu: {_shown(values.get('mfu'), '.2f', '%')}",
        ]
        if values.get("skipped_steps"):
            parts.append(f"skipped: {values['skipped_steps']}")
        return "  ".join([*parts, f"eta: {self._eta(step)}"])

    def _validation_line(self, values: Values) -> str:
        shown = {"loss": "7.4f", "ppl": ",.2f", "bpb": ".4f"}
        return "validate  " + "  ".join(f"{k}: {_shown(values.get(f'validation/{k}'), f)}" for k, f in shown.items())

    def _eta(self, step: int) -> str:
        first, since = self._start
        if step <= first:
            return "N/A"
        return duration((time.monotonic() - since) / (step - first) * (self._steps - step))


def duration(seconds: float) -> str:
    """3 significant places of time: 41s, 12m 05s, 3h 20m, 5d 04h."""
    whole = round(seconds)
    for size, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{name} {whole % size // below:02d}{below_name}"
    return f"{whole}s"


def keep_up_to(path: Path, step: int) -> None:
    """Drop the lines of `path` after `step`, and a last one that was cut off. Replaces the file in one instant."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    if kept != lines:
        aside = path.with_name(path.name + ".writing")
        aside.write_text("".join(kept))
        os.replace(aside, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json_number(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: Value, form: str, unit: str = "") -> str:
    return "N/A" if value is None else f"{value:{form}}{unit}"
