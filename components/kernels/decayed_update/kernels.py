"""The update of many weight tensors in one launch: each is read once and written once."""

import triton
import triton.language as tl

from components.kernels.launcher import Kernel


@Kernel
@triton.jit
def decayed_update(
    addresses,
    tensors,
    offsets,
    starts,
    sizes,
    update,
    lr,
    decay,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program updates one block of one part: `addresses` are those of the tensors, the rest is `blocks.Blocks`.
    ALIGNED: all of these are multiples of 16 bytes or 16 elements."""
    block = tl.program_id(0)
    start, size = tl.load(starts + block), tl.load(sizes + block)
    weights = tl.load(addresses + tl.load(tensors + block)).to(tl.pointer_type(tl.float32)) + tl.load(offsets + block)
    if ALIGNED:
        start, size, weights = tl.multiple_of(start, 16), tl.multiple_of(size, 16), tl.multiple_of(weights, 16)
    at = tl.arange(0, BLOCK)
    w = tl.load(weights + at, mask=at < size)
    u = tl.load(update + start + at, mask=at < size).to(tl.float32)
    decayed = decay * w
    if CAUTIOUS:
        decayed = tl.where(u * w > 0, decayed, 0.0)
    tl.store(weights + at, w - lr * (u + decayed), mask=at < size)
