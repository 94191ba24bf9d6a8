"""A plan in numbers: everything that `recipes.plan` prints, as one table that JSON can hold.

Parameters and FLOPs come from the formulas in the components' Configs (a test holds them against the built model),
memory from `memory.py`. Bytes are bytes, seconds are seconds; what cannot be known is None.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from components.metrics.flops import peak_tflops
from recipes.job import Job
from recipes.plan.loops import cache_residency, flops_by_loop, step_flops, virtual_parameters
from recipes.plan.memory import MASTER_BYTES, Footprint, footprint, memory_per_rank

# How each term is counted: training is three times the forward pass (backward does two products for each one).
FORMULAS = {
    "matmul": "3 × 2 × weights that a token meets (of the routed experts the chosen ones; a looped block each time)",
    "head": "3 × 2 × D × V for each loss, main and MTP depths",
    "attention": "3 × 2 × H × (K + V) × T/2 for each causal attention layer",
    "recurrence": "3 × 6 × H × K × V for each gated delta rule: S k, the rank-1 update, S q; in any chunks",
}


TOGETHER = {"norm": "norms", "residual": "residual factors"}  # parts that the table sums, by the end of their path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the run is planned for."""

    ranks: int  # GPUs
    gpu: str  # name, as torch.cuda.get_device_name() has it
    mfu: float | None  # percent of the stated peak that the run will reach
    tps: float | None  # tokens a second and GPU; goes before mfu
    price: float | None  # of a GPU for an hour


def estimate(job: Job, machine: Machine) -> dict[str, Any]:
    """The plan of a recipe on a machine."""
    config, training = job.model.config, job.training
    flops = config.flops_per_token(training.seq_len)
    model, total_flops = footprint(job), sum(flops.values())
    tokens = training.steps * training.tokens_per_step
    return {
        "recipe": job.job.config_file,
        "overlay": list(job.job.overlay),
        "stack": _stack(config, training.seq_len),
        "parameters": _parameters(config, model),
        "flops_per_token": {"total": total_flops, **flops},
        "flops_by_loop": flops_by_loop(config, training.seq_len),
        "cache_residency": cache_residency(job),
        "memory_per_rank": memory_per_rank(job, model, machine.ranks),
        "ranks": machine.ranks,
        "micro_batches": training.global_batch_size // (training.local_batch_size * machine.ranks),
        "tokens_per_step": training.tokens_per_step,
        "steps": training.steps,
        "tokens": tokens,
        "flops": total_flops * tokens,
        "checkpoint": _checkpoint(job, model),
        "time": _time(tokens, total_flops, machine),
    }


def _stack(config: Any, seq_len: int) -> list[dict[str, Any]]:
    """Every step of the flattened stack: what a token passes through, in order."""
    counts, steps = config.parameter_table(), []
    for step in config.steps():
        labels = config.blocks[step.block]
        own = [n for path, n in counts.items() if path.startswith(f"layers.{step.layer}.")]
        stored, active = (sum(column) for column in zip(*own, strict=True))
        row = {"step": step.index, "layer": step.layer, "zone": step.zone, "loop": step.loop, "block": step.block}
        names = {"mixer": _name(config.mixers, labels.mixer), "ffn": _name(config.ffns, labels.ffn)}
        flops = step_flops(config, step, seq_len)
        steps.append({**row, **names, "stored": stored, "active": active, "flops": flops})
    return steps


def _name(parts: dict[str, Any], label: str) -> str:
    return parts[label].name if label in parts else label


def _parameters(config: Any, model: Footprint) -> dict[str, Any]:
    counts = config.parameter_table()
    stored, active = (sum(column) for column in zip(*counts.values(), strict=True))
    return {
        "total": stored,
        "active": active,
        "unique": stored - counts["embedding"][0],
        "virtual": virtual_parameters(config),
        "by_part": _by_part(config, counts),
        "by_role": model.by_role,
    }


def _by_part(config: Any, counts: dict[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    """Stored and active parameters by label of mixer and FFN; embedding, MTP, wires and shared parts by name."""
    label = {}
    for step in config.steps():
        labels = config.blocks[step.block]
        label |= {f"layers.{step.layer}.mixer": labels.mixer, f"layers.{step.layer}.ffn": labels.ffn}
    stored, active = Counter(), Counter()
    for path, (all_of_it, used) in counts.items():
        together = [part for end, part in TOGETHER.items() if path.endswith(end)]
        part = together[0] if together else label.get(path, path)
        stored[part] += all_of_it
        active[part] += used
    return {part: {"stored": stored[part], "active": active[part]} for part in stored if stored[part]}


def _checkpoint(job: Job, model: Footprint) -> dict[str, int]:
    """Bytes of one checkpoint, and of all that are on disk at once."""
    one = MASTER_BYTES * model.parameters + model.optimizer_bytes + model.buffer_bytes
    section, made = job.checkpoint, -(-job.training.steps // job.checkpoint.interval)
    kept = min(made, section.keep_latest_k or made) + section.keep_best * job.validation.enable
    return {"bytes": one, "kept": kept * section.enable, "bytes_kept": one * kept * section.enable}


def _time(tokens: int, flops_per_token: float, machine: Machine) -> dict[str, float | None]:
    """Seconds and cost of the whole run, at the stated speed."""
    peak, tps = peak_tflops(machine.gpu), machine.tps
    if tps is None and peak is not None and machine.mfu is not None:
        tps = machine.mfu / 100 * peak * 1e12 / flops_per_token
    seconds = tokens / (tps * machine.ranks) if tps else None
    gpu_hours = seconds * machine.ranks / 3600 if seconds else None
    return {
        "peak_tflops": peak,
        "tps": tps,
        "mfu": 100 * tps * flops_per_token / (peak * 1e12) if tps and peak else None,
        "seconds": seconds,
        "gpu_hours": gpu_hours,
        "cost": gpu_hours * machine.price if gpu_hours and machine.price is not None else None,
    }
