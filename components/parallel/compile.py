"""torch.compile by part: whole blocks, the loss, or the mixers and FFNs of given labels. Modules compile in place, so
that parameter names stay."""

import torch

from components.models.stacked_lm import StackedLM


def apply_compile(model: StackedLM, components: tuple[str, ...], on_failure: str) -> None:
    """`components`: "model" (every block), "loss", labels of mixers or ffns. `on_failure` "plain" runs uncompiled,
    with a warning, what the compiler cannot take; "error" stops."""
    torch._dynamo.config.suppress_errors = on_failure == "plain"
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)  # blocks share one code
    if "loss" in components:
        model.loss = torch.compile(model.loss)
    blocks = model.config.blocks
    compiled: set[int] = set()
    for step in model.steps:
        layer, labels = model.layers[step.layer], blocks[step.block]
        parts = [layer] if "model" in components else []
        parts += [layer.mixer] if labels.mixer in components else []
        parts += [layer.ffn] if labels.ffn in components else []
        for part in parts:
            if id(part) not in compiled:
                compiled.add(id(part))
                part.compile()
