"""torch.compile by part: whole blocks, the loss, or the mixers and FFNs of given labels. Modules compile in place, so
that parameter names stay.

Sharding hooks inside a compiled block (its fp32 units, separate experts) and recorded mixers are not traced: the block
is compiled in the pieces between them.
"""

from collections.abc import Iterator

import torch
from torch import nn

from components.models.stacked_lm import StackedLM

CODES = 64  # compiled forms of one function before dynamo gives up: blocks share one code


def apply_compile(model: StackedLM, components: tuple[str, ...], on_failure: str) -> None:
    """`components`: "model" (every block), "loss", labels of mixers or ffns. Compilation happens at the first call:
    `on_failure` "plain" then runs uncompiled, with a warning, what the compiler cannot take; "error" stops."""
    torch._dynamo.config.suppress_errors = on_failure == "plain"
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, CODES)
    if "loss" in components:
        model.loss = torch.compile(model.loss)
    for part in dict.fromkeys(_parts(model, components)):  # looped and shared parts once
        part.compile()


def _parts(model: StackedLM, components: tuple[str, ...]) -> Iterator[nn.Module]:
    for step in model.steps:
        layer, labels = model.layers[step.layer], model.config.blocks[step.block]
        if "model" in components:
            yield layer
        if labels.mixer in components:
            yield layer.mixer
        if labels.ffn in components:
            yield layer.ffn
