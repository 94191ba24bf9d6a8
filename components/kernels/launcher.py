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

Compiled = tuple[Any, list]  # by Triton, and the constants that stand last in the signature
Known = dict["Kernel", Compiled]


class Kernel:
    def __init__(self, jitted: JITFunction):
        self.jitted = jitted
        self._compiled: dict[tuple, Compiled] = {}

    def __call__(self, programs: int, *arguments, known: Known | None = None, num_warps: int = 4, **constants) -> None:
        """`known`: the caller's own memory of calls that differ in addresses alone, which saves the key."""
        if known is not None and self in known:
            _launch(known[self], programs, arguments)
            return
        key = (_device(), num_warps, *constants.values(), *map(_specialisation, arguments))
        if key in self._compiled:
            _launch(self._compiled[key], programs, arguments)
        else:
            compiled = self.jitted[(programs,)](*arguments, num_warps=num_warps, **constants)
            if compiled is None:  # the interpreter compiles nothing
                return
            self._compiled[key] = compiled, [constants[name] for name in self.jitted.arg_names[len(arguments) :]]
        if known is not None:
            known[self] = self._compiled[key]


def _launch(found: Compiled, programs: int, arguments: tuple) -> None:
    compiled, last = found
    # Addresses, since of a tensor Triton's launcher asks the driver whether its address is a device's.
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    compiled[(programs, 1, 1)](*values, *last)


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _specialisation(x) -> tuple | type:
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x % 16 == 0, x == 1, x < 2**31
    return type(x)
