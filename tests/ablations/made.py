"""Result files of runs that never were, with known losses."""

import json
from pathlib import Path
from typing import Any

from recipes.result import FILE, FORMAT

STEPS, TOKENS_PER_STEP = 100, 1000


def result(losses: list[float], seed: int = 0, *, flops: float = 1e6, step_seconds: float = 0.5, active: int = 1000):
    """A run of 100 steps with evenly spaced validations, the last one at its end."""
    every = STEPS // len(losses)
    validations = [
        {"step": s, "tokens": s * TOKENS_PER_STEP, "validation/loss": x, "validation/bpb": x / 3}
        for s, x in zip(range(every, STEPS + 1, every), losses, strict=True)
    ]
    return {
        "format": FORMAT,
        "config_file": "made.toml",
        "recipe": recipe(seed),
        "device": "cpu",
        "ranks": 1,
        "runs_a_device": 1,
        "parameters": {"total": 2 * active, "active": active},
        "flops_per_token": {"total": flops},
        "cache_numbers": 160,
        "cache_numbers_expanded": 1024,
        "optimizer_load": {"matrix": 1.25},
        "step": STEPS,
        "tokens": STEPS * TOKENS_PER_STEP,
        "skipped_steps": 0,
        "step_seconds": step_seconds,
        "validations": validations,
        "summary": {"grad_norm": {"mean": 1.0, "variance": 0.5, "max": 2.0, "median": 1.0}, "loss_spikes": 0},
        "curves": {"step": [1, 50, 99], "loss": [5.0, None, 3.0], "grad_norm": [2.0, 1.0, 0.5], "lr/matrix": [1, 1, 1]},
        "expert_load": {"0": [0.25, 0.75]},
    }  # fmt: skip


def recipe(seed: int, **other: Any) -> dict[str, Any]:
    training = {"global_batch_size": 10, "seq_len": 100, "steps": STEPS}
    return {"job": {"dump_folder": "x"}, "training": training | other, "data": {"seed": seed}, "debug": {"seed": seed}}


def write(folder: Path, made: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / FILE).write_text(json.dumps(made))
    return folder
