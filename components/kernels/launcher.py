"""Launches of Triton kernels without Triton's own look at every argument, which costs the host more than the launch.

    @Kernel
    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr): ...

    add(programs, x, y, out, n, BLOCK=128)

A compiled kernel is found again by what Triton specialises on: constants, and of every argument its dtype, whether it
is a multiple of 16, and whether it is one. Constants stand last in a kernel's signature. Only grids of one dimension.
Triton's hooks around a launch, for its own profiler, are not called.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Compiled = tuple[Any, list]  # by Triton, and the constants that stand last in the signature
Taken = list[tuple[Compiled, int, tuple]]  # launches as they were made: kernel, programs, arguments


class Kernel:
    def __init__(self, jitted: JITFunction):
        self.jitted = jitted
        self._compiled: dict[tuple, Compiled] = {}

    def __call__(self, programs: int, *arguments, taken: Taken | None = None, num_warps: int = 4, **constants) -> None:
        """`taken`: where the launch is taken down, to be repeated. The interpreter's are not."""
        key = (_device(), num_warps, *constants.values(), *map(_specialisation, arguments))
        if key in self._compiled:
            compiled, last = self._compiled[key]
            # Addresses, since of a tensor Triton's launcher asks the driver whether its address is a device's.
            values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
            _launch(compiled, programs, _stream(), *values, *last)
        else:
            compiled = self.jitted[(programs,)](*arguments, num_warps=num_warps, **constants)
            if compiled is None:  # the interpreter compiles nothing
                return
            self._compiled[key] = compiled, [constants[name] for name in self.jitted.arg_names[len(arguments) :]]
        if taken is not None:
            taken.append((self._compiled[key], programs, arguments))


class Launches:
    """Launches taken down, to be repeated with other values for `own`, the tensors and numbers of one call (each an
    object of its own). All else they take has to be alike in every call, and so has what Triton specialises on.
    ValueError if they take a tensor that is none of these."""

    def __init__(self, taken: Taken, own: Sequence[Tensor | float | None]):
        places = {id(x): place for place, x in enumerate(own) if x is not None}
        self._constants, self._launches = [], []

        def place(x) -> int:
            if id(x) in places:
                return places[id(x)]
            if isinstance(x, Tensor):
                raise ValueError("a launch to be repeated takes a tensor that is not the call's own")
            self._constants.append(x)
            return len(own) + len(self._constants) - 1

        for (compiled, last), programs, arguments in taken:
            self._launches.append((compiled, programs, itemgetter(*map(place, (*arguments, *last)))))

    def __call__(self, values: list[int | float]) -> None:
        """`values`: an address for each tensor of `own`, a number for each number, anything for None."""
        values, stream = values + self._constants, _stream()
        for compiled, programs, arguments in self._launches:
            _launch(compiled, programs, stream, *arguments(values))


def _launch(compiled, programs: int, stream: int, *arguments) -> None:
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def _stream() -> int:
    active = driver.active
    return active.get_current_stream(active.get_current_device())


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _specialisation(x) -> tuple | type:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x % 16 == 0, x == 1, x < 2**31
    return type(x)
