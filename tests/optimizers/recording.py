"""What a CUDA graph keeps of functions, on any device: operations on tensors where they lie, with the host's numbers as
they were. Stands in for `components.parallel.micro_batch.capture`, so that what must not change between replays (an
address, a rate, a branch) shows without a GPU."""

from collections.abc import Callable, Sequence

from torch.fx.experimental.proxy_tensor import make_fx


def capture(functions: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
    """A run to warm up, a second one that is traced; from then on the trace."""
    traces = []
    for function in functions:
        function()
        traces.append(make_fx(function)())
    return traces
