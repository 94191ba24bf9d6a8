"""What a CUDA graph does to tensors, on the CPU: fixed inputs, outputs and gradients, written over by each replay.

Stands in for `torch.cuda.make_graphed_callables` and for the recording of a micro-batch, so that mistakes with such
memory show without a GPU: a gradient kept where the next replay writes, weights that were copied instead of read in
place, two calls before one backward.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from components.models.stacked_lm import Output


def capture(functions: tuple[Callable, ...], samples: tuple[tuple[Tensor, ...], ...]) -> tuple[Callable, ...]:
    return tuple(_capture(function, sample) for function, sample in zip(functions, samples, strict=True))


def _capture(function: Callable, sample: tuple[Tensor, ...]) -> Callable:
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in sample]  # the samples' own memory
    output = function(*inputs).detach().clone()
    gradients = {i: torch.zeros_like(t) for i, t in enumerate(inputs) if t.requires_grad}
    graph: dict[str, Tensor] = {}

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given: Tensor) -> Tensor:
            for held, new in zip(inputs, given, strict=True):
                if held.data_ptr() != new.data_ptr():
                    held.copy_(new)
            with torch.enable_grad():
                graph["output"] = function(*inputs)
            return output.copy_(graph["output"]).detach()

        @staticmethod
        def backward(ctx, grad: Tensor):
            found = torch.autograd.grad(graph["output"], [inputs[i] for i in gradients], grad)
            for held, new in zip(gradients.values(), found, strict=True):
                held.copy_(new)
            return tuple(gradients[i].detach() if i in gradients else None for i in range(len(inputs)))

    return Replay.apply


def capture_micro_batch(functions: Sequence[Callable[[], Output]]) -> list[Callable[[], Output]]:
    """Runs each to warm up, as a recording does, and from then on always into the same outputs."""
    return [_into_the_same(function, function()) for function in functions]


def _into_the_same(function: Callable[[], Output], held: Output) -> Callable[[], Output]:
    def replay() -> Output:
        new = function()
        for old, value in zip(_tensors(held), _tensors(new), strict=True):
            old.copy_(value)
        return held

    return replay


def _tensors(output: Output) -> list[Tensor]:
    return [output.loss_sums, output.target_counts, *output.aux.values()]
