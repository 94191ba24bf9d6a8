"""Momentum of many tensors in one launch: read once with the gradients, written once and rounded once."""

import triton
import triton.language as tl

from components.kernels.launcher import Kernel


@Kernel
@triton.jit
def momentum(
    momenta,
    gradients,
    tensors,
    offsets,
    starts,
    sizes,
    rounded,
    kept,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program updates one block of one part: `momenta` and `gradients` are the tensors' addresses, the rest is
    `blocks.Blocks`. ALIGNED: all of these are multiples of 16 bytes or 16 elements."""
    block = tl.program_id(0)
    number, offset = tl.load(tensors + block), tl.load(offsets + block)
    start, size = tl.load(starts + block), tl.load(sizes + block)
    m = tl.load(momenta + number).to(tl.pointer_type(tl.float32)) + offset
    g = tl.load(gradients + number).to(tl.pointer_type(tl.float32)) + offset
    if ALIGNED:
        start, size = tl.multiple_of(start, 16), tl.multiple_of(size, 16)
        m, g = tl.multiple_of(m, 16), tl.multiple_of(g, 16)
    at = tl.arange(0, BLOCK)
    gradient = tl.load(g + at, mask=at < size)
    average = tl.load(m + at, mask=at < size)
    average += (1 - kept) * (gradient - average)
    tl.store(m + at, average, mask=at < size)
    if NESTEROV:
        average += (1 - kept) * (gradient - average)
    tl.store(rounded + start + at, average.to(rounded.dtype.element_ty), mask=at < size)
