"""A sum in place; a program takes a block of values."""

import triton
import triton.language as tl


@triton.jit
def add_into(total, values, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    new = tl.load(total + i, inside) + tl.load(values + i, inside).to(tl.float32)
    tl.store(total + i, new, inside)
