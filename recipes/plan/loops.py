"""What looping and sharing do to a stack: its size without them, FLOPs by loop, and whether a looped zone's weights
could stay in a GPU's L2 cache from one loop to the next.

Cache sizes are the vendors' statements, in bytes of the whole device. What else needs the cache (activations, the
other operand of every product) is left out, in favour of the zone.
"""

from typing import Any

import torch

from recipes.job import Job

MIB = 2**20
L2_BYTES = {  # NVIDIA's architecture papers; B200's and GB10's as the driver reports them
    "A100": 40 * MIB,
    "H100": 50 * MIB,
    "H200": 50 * MIB,
    "B200": 126 * MIB,
    "RTX 4090": 72 * MIB,
    "RTX PRO 6000": 128 * MIB,
    "GB10": 24 * MIB,
}


def step_parts(config: Any, step: Any) -> list[Any]:
    """The configs of the mixer and, where there is one, the FFN of a step."""
    labels = config.blocks[step.block]
    ffn = [config.ffns[labels.ffn].config] if labels.ffn in config.ffns else []
    return [config.mixers[labels.mixer].config, *ffn]


def step_flops(config: Any, step: Any, seq_len: int) -> float:
    """Training FLOPs a token of one step, as `flops_per_token` counts them."""
    return 3 * sum(sum(part.flops(config.dim, seq_len).values()) for part in step_parts(config, step))


def virtual_parameters(config: Any) -> int:
    """Parameters of the same stack with nothing shared and nothing looped: every step has a block of its own."""
    beside = sum(n for path, (n, _) in config.parameter_table().items() if not path.startswith(("layers.", "shared.")))
    return beside + sum(_block(config, step) for step in config.steps())


def flops_by_loop(config: Any, seq_len: int) -> list[dict[str, Any]]:
    """Training FLOPs a token of every pass through every zone, in order."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for step in config.steps():
        row = rows.setdefault((step.zone, step.loop), {"zone": step.zone, "loop": step.loop, "steps": 0, "flops": 0.0})
        row["steps"] += 1
        row["flops"] += step_flops(config, step, seq_len)
    return list(rows.values())


def cache_residency(job: Job) -> list[dict[str, Any]]:
    """Of each looped zone: bytes of its weights in compute dtype, and the part of them that each GPU's L2 holds."""
    config, width = job.model.config, getattr(torch, job.training.dtype).itemsize
    found = []
    for label in config.order:
        once = {step.layer: step for step in config.steps() if step.zone == label}
        if config.zones[label].loops > 1:
            size = width * sum(_block(config, step) for step in once.values())
            held = {gpu: {"l2_bytes": l2, "share": min(1.0, l2 / size)} for gpu, l2 in L2_BYTES.items()}
            found.append({"zone": label, "loops": config.zones[label].loops, "bytes": size, "gpus": held})
    return found


def _block(config: Any, step: Any) -> int:
    """Parameters of a block that shares nothing."""
    parts = step_parts(config, step)
    around = config.norm.config.parameters(config.dim) + bool(config.residual)
    return sum(part.parameters(config.dim) + around for part in parts)
