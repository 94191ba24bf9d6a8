"""Calls recorded in a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor


def recorded(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]:
    """A recording of `step`, not replayed yet, what a call gave before, and what each replay will write to.

    Outputs are detached: an autograd graph that lived on would tie the recording to the stream of its leaves.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.detach() for x in step()]
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        found = [x.detach() for x in step()]
    return graph, expected, found
