"""What a run writes down about itself, and what a resumed run may change.

`recipe.toml` holds every value, defaults included, so that the run can be repeated from it after a default changes.
"""

import fnmatch
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path as File
from typing import Any

import tomli_w
import torch

from recipes.job.sections import Job
from registry import Component, Problem, RecipeError, parse

MAY_CHANGE = (
    "job.*",
    "tokenizer.path",
    "data.workers",
    "data.sources.*.path",
    "model.ffns.*.bias_speed",
    "model.mixers.*.chunk",
    "optimizer.*.lr",
    "optimizer.*.distribution",
    "lr_scheduler.*",
    "training.steps",
    "training.local_batch_size",
    "training.tf32",
    "training.max_skipped_steps",
    "parallelism.*",
    "activation_checkpoint.*",
    "compile.*",
    "cuda_graph.*",
    "fused_gdn.*",
    "moe_mixed_precision.*",
    "checkpoint.*",
    "validation.*",
    "metrics.*",
    "profiling.*",
    "comm.*",
    "debug.deterministic",
)
"""Keys that may differ when a run resumes (fnmatch): length, cadence, speed and place, and the rates that are tuned
by hand. Every other key fixes what the run means."""


def to_table(job: Job) -> dict[str, Any]:
    """The recipe that parses to `job`: every value, defaults included. None, which TOML lacks, is left out."""
    table = _plain(job)
    for flag in ("config_file", "overlay"):
        del table["job"][flag]
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return {"name": value.name, **_plain(value.config)}
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(v) for f in fields(value) if f.init and (v := getattr(value, f.name)) is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The dotted keys in which two tables of `to_table` differ. A key that one was written too early to have is as by
    default."""
    before, after = _flat(completed(old)), _flat(completed(new))
    return [key for key in {**before, **after} if key not in before or key not in after or before[key] != after[key]]


def refused_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Those differences that a resumed run may not have, as 'key: old -> new'."""
    before, after = _flat(completed(old)), _flat(completed(new))
    refused = [key for key in differences(old, new) if not any(fnmatch.fnmatchcase(key, p) for p in MAY_CHANGE)]
    return [f"{key}: {before.get(key, 'not stated')!r} -> {after.get(key, 'not stated')!r}" for key in refused]


def completed(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A table of `to_table` with the keys that have come since; itself if today's recipes no longer take it, or its
    components are not registered."""
    hints = typing.get_type_hints(Job, include_extras=True)
    problems = [Problem((name,), "is no section") for name in table if name not in hints]
    sections = {name: parse(hints[name], table.get(name, {}), (name,), problems) for name in hints}
    return table if problems else to_table(Job(**sections))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def refuse_unwritable(folder: str, key: str) -> None:
    """RecipeError where `folder`, stated under `key`, can be neither written into nor made. Makes nothing itself."""
    place = File(folder).absolute()
    there = next(part for part in (place, *place.parents) if os.path.exists(part))
    if not os.path.isdir(there):
        raise RecipeError([Problem((key,), f"{folder} cannot be made, since {there} is a file; name another folder")])
    if not os.access(there, os.W_OK | os.X_OK):
        raise RecipeError([Problem((key,), f"{there} is not yours to write into; name another folder")])


def write_resolved(job: Job, folder: str) -> None:
    """recipe.toml, code.diff (the commit, then what differs from it) and environment.json, into `folder`. One rank."""
    place = File(folder)
    place.mkdir(parents=True, exist_ok=True)
    head = f"# Resolved from {' + '.join([job.job.config_file, *job.job.overlay])}; load it like any recipe.\n\n"
    (place / "recipe.toml").write_text(head + tomli_w.dumps(to_table(job)), encoding="utf-8")
    (place / "code.diff").write_text(_git("log", "-1", "--format=commit %H%n%cI %s") + "\n" + _git("diff", "HEAD"))
    (place / "environment.json").write_text(json.dumps(_environment(), indent=1) + "\n")


def _git(*arguments: str) -> str:
    here = File(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"git {arguments[0]}: {error}\n"
    return done.stdout if done.returncode == 0 else f"git {arguments[0]}: {done.stderr.strip()}\n"


def _environment() -> dict[str, Any]:
    prefixes = ("CUDA_", "NCCL_", "TORCH", "PYTORCH", "TRITON_", "OMP_", "SLURM_JOB", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": dict(sorted((d.name, d.version) for d in importlib.metadata.distributions())),
        "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)},
    }
