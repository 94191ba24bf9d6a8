"""Launches of Triton kernels without Triton's own look at every argument, which costs the host more than the launch.

    @Kernel
    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr): ...

    add(programs, x, y, out, n, BLOCK=128)

A compiled kernel is found again by what Triton specialises on: constants, and of every argument its dtype, whether it
is a multiple of 16, and whether it is one. Constants stand last in a kernel's signature. Only grids of one dimension.
"""

from typing import Any

import torch
from triton.runtime.jit import JITFunction


class Kernel:
    def __init__(self, jitted: JITFunction):
        self.jitted = jitted
        self._compiled: dict[tuple, tuple[Any, list]] = {}

    def __call__(self, programs: int, *arguments, num_warps: int = 4, **constants) -> None:
        key = (_device(), num_warps, *constants.values(), *map(_specialisation, arguments))
        if key in self._compiled:
            compiled, last = self._compiled[key]
            compiled[(programs, 1, 1)](*arguments, *last)
            return
        compiled = self.jitted[(programs,)](*arguments, num_warps=num_warps, **constants)
        if compiled is not None:  # the interpreter compiles nothing
            last = [constants[name] for name in self.jitted.arg_names[len(arguments) :]]
            self._compiled[key] = compiled, last


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _specialisation(x) -> tuple | type:
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x % 16 == 0, x == 1, x < 2**31
    return type(x)
