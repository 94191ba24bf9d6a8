"""CUDA graphs: a mixer's forward and backward recorded once and replayed, so that its many kernels cost two launches.

A recording reads and writes fixed addresses, and a unit of FSDP-2 gathers its weights to another address each time. So
a recorded mixer is part of no unit: every rank keeps its weights whole, in fp32 and in one place (HyMo's latent
attention has 22 M of 1,129 M), casts them within the recording, and the ranks average their gradients after every
micro-batch. Updates are the same on all ranks, so the copies stay equal bit for bit.

This is for `fsdp2`; a plan that keeps every weight whole records whole micro-batches (`micro_batch.py`). Left out on
purpose: masks for packed documents within a recorded mixer.
Shapes: B batch, T sequence, D width.
"""

from collections.abc import Callable, Iterator
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from components.interfaces import Aux, Cache, Context
from components.models.stacked_lm import StackedLM
from components.parallel.optional import require_cuda
from registry import unknown


def obstacles(model: StackedLM, labels: tuple[str, ...]) -> Iterator[str]:
    """Why the mixers of these labels cannot be recorded, a sentence a reason. Looks at the structure only, so a model
    on the meta device will do."""
    config = model.config
    for label in labels:
        if label not in config.mixers:
            yield unknown("mixer label", label, config.mixers)
            continue
        layers = [step.layer for step in model.steps if config.blocks[step.block].mixer == label]
        mixers = [model.layers[layer].mixer for layer in layers]
        if len(set(mixers)) < len(mixers):
            yield (
                f'mixer "{label}" runs several times in one micro-batch (loops or share): a second replay would '
                "overwrite the activations that the first left for backward; take it out, or record the whole "
                'micro-batch (components = ["model"] under plan = "zero1")'
            )
        if getattr(config.mixers[label].config, "lends", None) or getattr(config.mixers[label].config, "borrows", None):
            yield f'mixer "{label}" shares keys with other layers, which a recording cannot pass on; take it out'
        if any(getattr(part, "fp32_unit", False) for mixer in mixers for part in mixer.modules()):
            yield (
                f'mixer "{label}" has parts in sharded fp32 units of their own, whose weights move, and a recording '
                "needs fixed addresses; take it out"
            )


@final
class WholeMixer(nn.Module):
    """A mixer whose weights this rank keeps whole, in fp32. They are cast to `dtype`, in which it computes, at each
    call; the call is replayed once there is a recording."""

    def __init__(self, mixer: nn.Module, dtype: torch.dtype):
        super().__init__()
        self._whole, self.dtype = mixer, dtype
        self.recording: Callable | None = None
        self.shape: tuple[int, int] | None = None  # the micro-batch that was recorded

    @torch.compiler.disable
    def forward(self, x_BTD: Tensor, ctx: Context, cache: Cache | None = None) -> tuple[Tensor, Aux]:
        if self.recording is None or not self.training or not torch.is_grad_enabled():
            return self._run(x_BTD, ctx, cache)
        if x_BTD.shape[:2] != self.shape:
            raise ValueError(f"a mixer recorded for micro-batches of {self.shape} was given {tuple(x_BTD.shape[:2])}")
        return self.recording(x_BTD, ctx.position_BT, *self._whole.parameters()), {}

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> Cache:
        return self._whole.new_cache(batch, max_len, dtype, device)

    def recordable(self, x_BTD: Tensor, position_BT: Tensor, *weights: Tensor) -> Tensor:
        """The forward as a function of tensors alone."""
        names = (name for name, _ in self._whole.named_parameters())
        cast = {name: weight.to(self.dtype) for name, weight in zip(names, weights, strict=True)}
        return functional_call(self._whole, cast, (x_BTD, Context(position_BT)))[0]

    def sample(self, rows: int, length: int, dim: int) -> tuple[Tensor, ...]:
        """Inputs for the recording. The weights are the parameters themselves, so that replays read them in place."""
        weights = tuple(self._whole.parameters())
        x_BTD = torch.zeros(rows, length, dim, dtype=self.dtype, device=weights[0].device, requires_grad=True)
        return x_BTD, torch.arange(length, device=x_BTD.device).expand(rows, length).contiguous(), *weights

    def average_gradients(self) -> None:
        """From here on a micro-batch's gradients arrive averaged over the ranks, and as copies: those of a recording
        lie where its next replay writes."""
        for parameter in self._whole.parameters():
            parameter.register_hook(_average)

    def _run(self, x_BTD: Tensor, ctx: Context, cache: Cache | None) -> tuple[Tensor, Aux]:
        cast = {name: weight.to(self.dtype) for name, weight in self._whole.named_parameters()}
        return functional_call(self._whole, cast, (x_BTD, ctx, cache))


def keep_whole(model: StackedLM, labels: tuple[str, ...], dtype: torch.dtype) -> None:
    """Take the mixers of these labels out of sharding. Raises ValueError if they cannot be recorded."""
    for reason in obstacles(model, labels):
        raise ValueError(f"[cuda_graph]: {reason}")
    for step in model.steps:
        if model.config.blocks[step.block].mixer in labels:
            block = model.layers[step.layer]
            block.mixer = WholeMixer(block.mixer, dtype)


def whole_mixers(model: nn.Module) -> list[WholeMixer]:
    return [module for module in model.modules() if isinstance(module, WholeMixer)]


def record(model: StackedLM, micro_batch: tuple[int, int]) -> None:
    """Record every whole mixer for micro-batches of (rows, positions), after initialisation and before anything else
    uses the device. Raises RuntimeError without a CUDA device, and whatever the capture raises."""
    mixers = whole_mixers(model)
    samples = tuple(mixer.sample(*micro_batch, model.config.dim) for mixer in mixers)
    for mixer, recording in zip(mixers, capture(tuple(m.recordable for m in mixers), samples), strict=True):
        mixer.recording, mixer.shape = recording, micro_batch


def capture(functions: tuple[Callable, ...], samples: tuple[tuple[Tensor, ...], ...]) -> tuple[Callable, ...]:
    """Each function, recorded on its sample; they run in this order and their backwards in the opposite one."""
    require_cuda()
    return torch.cuda.make_graphed_callables(functions, samples)


def _average(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()
