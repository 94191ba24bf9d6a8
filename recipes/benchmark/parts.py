"""Where a step's device time goes: the kernels of an eager step, by the part of the model that launched them.

Forward kernels belong to the part whose call they were launched in. Autograd numbers the nodes that a forward makes,
so a backward kernel belongs to the part whose call made its node. What lies in no part (norms, residual sums, the
embedding, casts and reductions of sharding, sums of gradients) is the rest.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from components.models.stacked_lm import StackedLM

PREFIX = "part: "
HEADS, REST = "heads and loss", "rest"


@dataclass
class Nodes:
    """Which part made which autograd nodes: half-open ranges of their numbers, by part."""

    ranges: list[tuple[int, int, str]] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def part(self, label: str) -> Iterator[None]:
        first = torch.autograd._get_sequence_nr()
        with record_function(PREFIX + label):
            yield
        if threading.get_ident() == self.thread:  # not what is computed again during backward
            self.ranges.append((first, torch.autograd._get_sequence_nr(), label))

    def label(self, number: int) -> str:
        return next((label for first, end, label in self.ranges if first <= number < end), REST)


def time_by_part(model: StackedLM, optimizer: Any, step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """ms by part of one call of `step`, which runs the model forward and backward, and its optimizer: kernel time on a
    CUDA device, else the host's."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with observed(model, optimizer) as nodes, profile(activities=kinds) as recorded:
        step()
    times = Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CPU:
            own = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
            times[_part(event, nodes)] += own / 1e3 if own else 0.0
    return {part: ms for part, ms in times.most_common() if ms}


@contextmanager
def observed(model: StackedLM, optimizer: Any) -> Iterator[Nodes]:
    """While it lasts, calls of the model's parts and of the optimizer are noted."""
    nodes = Nodes()
    with ExitStack() as until:
        for module, label in labelled(model).items():
            until.enter_context(_hooked(module, label, nodes))
        for owner, name, label in (
            (model, "loss", HEADS),
            (optimizer, "clip", "optimizer"),
            (optimizer, "step", "optimizer"),
        ):
            until.enter_context(wrapped(owner, name, lambda call, label=label: _noted(call, label, nodes)))
        yield nodes


def labelled(model: StackedLM) -> dict[nn.Module, str]:
    """The modules that are parts: mixers and FFNs by their label in the recipe, further heads, the final norm."""
    found = {model.norm: HEADS} | {depth: HEADS for depth in (model.mtp.depths if model.mtp else ())}
    for step in model.steps:
        layer, labels = model.layers[step.layer], model.config.blocks[step.block]
        found[layer.mixer] = f"mixer {labels.mixer}"
        if layer.ffn is not None:
            found[layer.ffn] = f"ffn {labels.ffn}"
    return found


@contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """While it lasts, `owner.name` is `wrap` of what it was."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original) if own else delattr(owner, name)


@contextmanager
def _hooked(module: nn.Module, label: str, nodes: Nodes) -> Iterator[None]:
    calls: list[ExitStack] = []

    def begin(*_) -> None:
        calls.append(ExitStack())
        calls[-1].enter_context(nodes.part(label))

    handles = module.register_forward_pre_hook(begin), module.register_forward_hook(lambda *_: calls.pop().close())
    yield
    for handle in handles:
        handle.remove()


def _noted(call: Callable, label: str, nodes: Nodes) -> Callable:
    def inner(*arguments, **options):
        with nodes.part(label):
            return call(*arguments, **options)

    return inner


def _part(event: Any, nodes: Nodes) -> str:
    """The part of the innermost call that tells one."""
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        if event.name.startswith("autograd::engine::evaluate_function"):
            return nodes.label(event.sequence_nr)
        event = event.cpu_parent
    return REST
