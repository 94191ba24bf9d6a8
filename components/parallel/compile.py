"""torch.compile by part: whole blocks and MTP depths, the loss, or the mixers and FFNs of given labels, in place, so
that parameter names stay.

What is compiled lies inside the block's sharding hooks and inside its activation checkpoint, neither of which the
compiler can trace. Sharded units within a part (its fp32 units, separate experts) and recorded mixers end a trace: the
part is compiled in the pieces between them.
"""

import signal
from collections.abc import Iterator

import torch
from torch import nn

from components.models.stacked_lm import StackedLM

CODES = 64  # compiled forms of one function before dynamo gives up: blocks share one code


def apply_compile(model: StackedLM, components: tuple[str, ...], backend: str, on_failure: str) -> None:
    """`components`: "model" (every block and MTP depth), "loss", labels of mixers or ffns. Compilation happens at the
    first call: `on_failure` "plain" then runs uncompiled, with a warning, what the compiler cannot take; "error"
    stops."""
    if backend == "inductor":
        start_workers()
    torch._dynamo.config.suppress_errors = on_failure == "plain"
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, CODES)
    if "loss" in components:
        model.loss = torch.compile(model.loss, backend=backend)
    if "model" in components:
        for layer in model.layers:
            layer.run = torch.compile(layer.run, backend=backend)
        for depth in model.mtp.depths if model.mtp is not None else ():
            depth.forward = torch.compile(depth.forward, backend=backend)
    for part in dict.fromkeys(_labelled(model, components)):  # looped and shared parts once
        part.compile(backend=backend)


def start_workers() -> None:
    """The compiler's processes, deaf to what asks this one to save and stop. Batch systems and terminals send that to
    all processes of a job, and a compilation whose worker has gone never ends."""
    from torch._inductor.async_compile import AsyncCompile  # slow to import

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # inherited by processes
    try:
        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def conflicts(components: tuple[str, ...], recomputed: tuple[str, ...], by_op: bool) -> Iterator[str]:
    """Why compiling `components` does not go with recomputing the parts `recomputed` (whole, or choosing by op)."""
    parts = set(components) - {"loss"}
    if by_op and parts and ("model" in parts or "model" in recomputed or parts & set(recomputed)):
        yield (
            'recomputing by "op" sees operations one by one, and a compiled part is a single one: recompute it whole '
            '(mode = "full", or every n-th block), or compile other parts'
        )
    if "model" in parts and recomputed and "model" not in recomputed:
        yield (
            "a part that is recomputed by itself inside a compiled block would run uncompiled: compile by labels "
            'instead of "model", or recompute "model"'
        )


def _labelled(model: StackedLM, components: tuple[str, ...]) -> Iterator[nn.Module]:
    for step in model.steps:
        layer, labels = model.layers[step.layer], model.config.blocks[step.block]
        if labels.mixer in components:
            yield layer.mixer
        if labels.ffn in components:
            yield layer.ffn
