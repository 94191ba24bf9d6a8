"""One micro-batch, forward and backward: launched kernel by kernel, or recorded once as a CUDA graph and replayed.

Thousands of kernels of some microseconds each leave the GPU waiting for the host; a replay costs one launch. The
recording reads and writes fixed addresses: inputs and outputs here, weights and gradient sums of a plan that keeps
them in place (`zero1`).
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TypeVar, final

import torch
from torch import Tensor

from components.data.batch import Batch
from components.data.packing import cu_seqlens_length
from components.models.stacked_lm import Output, StackedLM
from components.parallel.optional import require_cuda

T = TypeVar("T")
WARM_UPS = 2  # runs before a recording: compilation, workspaces of libraries


@final
class MicroBatch:
    """Forward and backward of `model`, plain until `record` was called."""

    def __init__(self, model: StackedLM):
        self.model = model
        self._inputs: tuple[Batch, Tensor] | None = None
        self._replay: Callable[[], Output] | None = None

    def __call__(self, batch: Batch, scale_H: Tensor) -> Output:
        """Gradients of Σ scale · loss sums are added to what the parameters have; the output is detached.

        scale_H: fp32 (heads,). Raises ValueError if it was recorded for batches of another shape.
        """
        if self._replay is None:
            return self._run(batch, scale_H)
        held, held_scale = self._inputs
        for field in fields(Batch):
            _overwrite(field.name, getattr(held, field.name), getattr(batch, field.name))
        held_scale.copy_(scale_H)
        output = self._replay()
        aux = {name: value.clone() for name, value in output.aux.items()}
        return Output(output.loss_sums.clone(), output.target_counts.clone(), aux)

    def record(self, batch: Batch) -> None:
        """Replay from here on what a run on `batch` (a sample, whose gradients count for nothing) launches. Raises
        RuntimeError without a CUDA device, and whatever the capture raises."""
        scale_H = torch.ones(self.model.config.heads(), device=batch.tokens_BT1.device)
        held = replace(batch, **{f.name: _clone(getattr(batch, f.name)) for f in fields(Batch)})
        (self._replay,) = capture([lambda: self._run(held, scale_H)])
        self._inputs = held, scale_H

    def _run(self, batch: Batch, scale_H: Tensor) -> Output:
        output = self.model(batch)
        (output.loss_sums * scale_H).sum().backward()
        return Output(output.loss_sums.detach(), output.target_counts, output.aux)


def capture(functions: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
    """Each function, recorded; a call replays it into the same outputs. They share memory for what is no output, so no
    two may run at a time. Raises RuntimeError without a CUDA device."""
    require_cuda()
    pool = torch.cuda.graph_pool_handle()
    return [_capture(function, pool) for function in functions]


def _capture(function: Callable[[], T], pool: tuple[int, int]) -> Callable[[], T]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = function()

    def replay() -> T:
        graph.replay()
        return output

    return replay


def sample_batch(rows: int, length: int, vocab_size: int, packing: str, device: torch.device) -> Batch:
    """A batch of the loader's shapes: in document packing, each row one document."""
    tokens_BT1 = torch.arange(rows * (length + 1), device=device).view(rows, length + 1) % vocab_size
    position_BT, index_B = torch.arange(length, device=device).repeat(rows, 1), torch.arange(rows, device=device)
    if packing == "window":
        return Batch(tokens_BT1, position_BT, index_B)
    starts = torch.arange(cu_seqlens_length(rows, length), device=device, dtype=torch.int32) * length
    document_BT1 = torch.zeros_like(tokens_BT1, dtype=torch.int32)
    return Batch(tokens_BT1, position_BT, index_B, document_BT1, starts.clamp(max=rows * length))


def _overwrite(name: str, held: Tensor | None, new: Tensor | None) -> None:
    shapes = [None if t is None else tuple(t.shape) for t in (held, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"a micro-batch recorded with {name} of shape {shapes[0]} was given {shapes[1]}")
    if held is not None:
        held.copy_(new)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
