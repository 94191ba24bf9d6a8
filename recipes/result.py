"""The small file that a finished run leaves: result.json, all that a report needs, so that runs of several machines
merge by copying it alone.

It holds the resolved recipe (by which a run is recognised), what the model's Config counts, every validation, and of
metrics.jsonl a summary and thinned curves. Time is the median step's, so that compilation and validation do not count.
"""

import fnmatch
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recipes.job import differences, to_table

if TYPE_CHECKING:
    from recipes.pretrain import Run

FORMAT = 1
FILE = "result.json"
CURVE_POINTS = 200
CURVES = ("loss", "grad_norm", "lr/", "update_rms/")  # keys, or how they begin
WARM = 0.1  # part of a run that summaries leave out: rates and experts still settle
SPIKE = 0.5  # nats above the median of the lines around it

ELSEWHERE = (
    "job.*",
    "tokenizer.path",
    "data.workers",
    "data.sources.*.path",
    "checkpoint.*",
    "metrics.enable_tensorboard",
    "profiling.*",
    "comm.*",
)
"""Keys that say where and how a run is kept, and nothing of what it is (fnmatch)."""

SHARING = "HYMO_RUNS_A_DEVICE"  # in the environment: how many runs share this one's devices; recipes.ablate says it

Line = Mapping[str, Any]
Result = dict[str, Any]


def write_result(run: "Run") -> None:
    """result.json of a run that made its last step, complete in one instant. Rank 0, after the last line was logged.
    Nothing where the log of a finished run was taken away."""
    folder = Path(run.job.job.dump_folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if not any("loss" in line for line in lines):
        return
    result = {**_facts(run), **_measured(run, lines)}
    aside = folder / f"{FILE}.writing"
    aside.write_text(json.dumps(result) + "\n", encoding="utf-8")
    os.replace(aside, folder / FILE)


def read_result(folder: Path) -> Result | None:
    """The result in a run's folder; None if it has not finished. ValueError for one of another format."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["format"] == FORMAT:
            return result
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a result of format {FORMAT}; remove it and run that recipe again")


def other_recipe(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys by which two resolved recipes are different runs."""
    return [key for key in differences(old, new) if not any(fnmatch.fnmatchcase(key, p) for p in ELSEWHERE)]


def _facts(run: "Run") -> dict[str, Any]:
    """What is known without having trained."""
    config, place = run.model.config, run.place
    stored, active = (sum(column) for column in zip(*config.parameter_table().values(), strict=True))
    flops = config.flops_per_token(run.job.training.seq_len)
    on_cuda = place.device.type == "cuda"
    return {
        "format": FORMAT,
        "config_file": run.job.job.config_file,
        "recipe": to_table(run.job),
        "device": torch.cuda.get_device_name(place.device) if on_cuda else "cpu",
        "ranks": place.ranks,
        "runs_a_device": int(os.environ.get(SHARING, "1")),
        "parameters": {"total": stored, "active": active},
        "flops_per_token": {"total": sum(flops.values()), **flops},
        "cache_numbers": _cache(config, "cache_numbers"),
        "cache_numbers_expanded": _cache(config, "expanded_cache_numbers"),
        "optimizer_load": {role: load.max_over_mean for role, load in run.optimizer.load_reports().items()},
    }


def _cache(config: Any, count: str) -> int:
    """Numbers a token that decoding keeps, over all steps of the stack."""
    mixers = [config.mixers[config.blocks[step.block].mixer].config for step in config.steps()]
    return sum(getattr(mixer, count, mixer.cache_numbers)() for mixer in mixers)


def _measured(run: "Run", lines: Sequence[Line]) -> dict[str, Any]:
    training = [line for line in lines if "validation/loss" not in line]
    warm = [line for line in training if line["step"] > WARM * run.progress.step] or training
    return {
        "step": run.progress.step,
        "tokens": run.progress.tokens,
        "skipped_steps": run.progress.skipped_steps,
        "step_seconds": statistics.median(line["time/step"] for line in warm),
        "validations": _validations(lines, run.job.training.tokens_per_step),
        "summary": {**_summary(warm), "loss_spikes": spikes([line["loss"] for line in warm])},
        "curves": _curves(training),
        "expert_load": _expert_load(run),
    }


def _validations(lines: Sequence[Line], tokens_per_step: int) -> list[dict[str, Any]]:
    """Every validation line, with the tokens trained until then."""
    found, skipped = [], 0
    for line in lines:
        if "validation/loss" in line:
            found.append({**line, "tokens": (line["step"] - skipped) * tokens_per_step})
        else:
            skipped = line["skipped_steps"]
    return found


def _summary(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """mean, variance, maximum and median of every number of the training lines."""
    values: dict[str, list[float]] = {}
    for line in lines:
        for key, value in line.items():
            if value is not None and key != "step":
                values.setdefault(key, []).append(value)
    return {
        key: {
            "mean": statistics.fmean(found),
            "variance": statistics.variance(found) if len(found) > 1 else 0.0,
            "max": max(found),
            "median": statistics.median(found),
        }
        for key, found in values.items()
    }


def spikes(losses: Sequence[float | None], around: int = 10) -> int:
    """How often the loss jumps SPIKE nats above the median of the `around` lines before; one that is no number does."""
    known = [(i, loss) for i, loss in enumerate(losses) if loss is not None]
    jumps = 0
    for place in range(1, len(known)):
        before = [loss for _, loss in known[max(0, place - around) : place]]
        jumps += known[place][1] > statistics.median(before) + SPIKE
    return jumps + len(losses) - len(known)


def _curves(lines: Sequence[Line]) -> dict[str, list[Any]]:
    """Some keys of at most CURVE_POINTS lines, evenly chosen, the last among them."""
    stride = -(-len(lines) // CURVE_POINTS)
    kept = lines[::-1][::stride][::-1]
    keys = [key for key in lines[-1] if key.startswith(CURVES)]
    return {"step": [line["step"] for line in kept]} | {key: [line.get(key) for line in kept] for key in keys}


def _expert_load(run: "Run") -> dict[str, list[float]]:
    """Each expert's share of the average load, by layer, where the layer keeps one."""
    loads = {}
    for number, layer in enumerate(run.model.layers):
        load_E = getattr(getattr(layer, "ffn", None), "load_E", None)
        if load_E is not None:
            loads[str(number)] = (load_E / load_E.sum().clamp(min=1e-12)).tolist()
    return loads
