"""What kernels do to memory, watched in Triton's interpreter, which runs program by program and knows no lanes.

    with watched():
        launch(...)

raises where a program touches anything but elements of the tensors it was given, where it reads or writes what another
program of the same launch writes, and where with no barrier since it reads back what it wrote or writes what another
lane (place in a block) read: on a GPU, lanes wait for each other only there. Every launch works on copies of its
tensors that lie far from each other. Left out: atomics, and the barriers within products and sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

FAR = 1 << 20  # bytes between tensors
SEVERAL = -1  # programs, or lanes


class Memory:
    """The copies of one launch's tensors in one allocation. Of each of its bytes: whether an element begins there,
    which program read it and which wrote it, and since the last barrier which lane read it and whether it was written.
    Programs and lanes are numbered from 1; 0 is none."""

    def __init__(self, tensors: list[Tensor]):
        self.copies, offset, places = {}, FAR, []
        for x in tensors:
            if _key(x) not in self.copies:
                self.copies[_key(x)] = None
                places.append((x, offset))
                offset += (_extent(x) // 16 + 1) * 16 + FAR
        self.bytes = torch.empty(offset, dtype=torch.uint8)
        self.begins, self.fresh = np.zeros(offset, bool), np.zeros(offset, bool)
        self.reader, self.writer, self.lane = (np.zeros(offset, np.int32) for _ in range(3))
        self.recent = []
        for x, offset in places:
            self.copies[_key(x)] = self._copy(x, offset)

    def _copy(self, x: Tensor, offset: int) -> Tensor:
        part = slice(offset, offset + _extent(x))
        steps = [stride * x.itemsize for stride in x.stride()]
        torch.from_numpy(self.begins).as_strided(x.shape, steps, offset).fill_(True)
        copy = self.bytes[part].view(x.dtype).as_strided(x.shape, x.stride())
        return copy.copy_(x) if x.numel() else copy

    def read(self, pointers: np.ndarray, mask: np.ndarray) -> None:
        where, lanes, me = self._elements(pointers[mask], "reads"), np.flatnonzero(mask) + 1, _program()
        assert _at_most(me, self.writer[where]).all(), "a program reads what another one writes"
        assert not self.fresh[where].any(), "a program reads back what it wrote without a barrier"
        self.reader[where] = np.where(_at_most(me, self.reader[where]), me, SEVERAL)
        self.lane[where] = np.where(_at_most(lanes, self.lane[where]), lanes, SEVERAL)
        self.recent.append(where)

    def write(self, pointers: np.ndarray, mask: np.ndarray) -> None:
        where, lanes, me = self._elements(pointers[mask], "writes"), np.flatnonzero(mask) + 1, _program()
        assert _at_most(me, self.writer[where]).all(), "two programs write the same element"
        assert _at_most(me, self.reader[where]).all(), "a program writes what another one reads"
        assert _at_most(lanes, self.lane[where]).all(), "a lane writes what another one read without a barrier"
        self.writer[where], self.fresh[where] = me, True
        self.recent.append(where)

    def barrier(self) -> None:
        while self.recent:
            where = self.recent.pop()
            self.fresh[where], self.lane[where] = False, 0

    def _elements(self, pointers: np.ndarray, does: str) -> np.ndarray:
        where = pointers.astype(np.int64) - self.bytes.data_ptr()
        inside = (where >= 0) & (where < len(self.begins))
        assert self.begins[where[inside]].all() and inside.all(), f"a program {does} outside its tensors"
        return where


def _key(x: Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _extent(x: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize if x.numel() else 0


def _at_most(one: int | np.ndarray, found: np.ndarray) -> np.ndarray:
    """Where nobody but `one` is found."""
    return (found == one) | (found == 0)


def _program() -> int:
    (x, y, _), (width, _, _) = interpreter_builder.grid_idx, interpreter_builder.grid_dim
    return 1 + x + y * width


@contextmanager
def watched() -> Iterator[None]:
    memory, launch = None, GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_launch(executor, *arguments, **options):
        nonlocal memory
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        memory = Memory(tensors)
        launch(executor, *(memory.copies[_key(x)] if isinstance(x, Tensor) else x for x in arguments), **options)
        for x in tensors:
            x.copy_(memory.copies[_key(x)])

    def watched_load(builder, pointers, mask, *rest):
        memory.read(pointers.data, mask.data.astype(bool))
        return load(builder, pointers, mask, *rest)

    def watched_store(builder, pointers, value, mask, *rest):
        memory.write(pointers.data, mask.data.astype(bool))
        return store(builder, pointers, value, mask, *rest)

    with (
        patch.object(GridExecutor, "__call__", watched_launch),
        patch.object(InterpreterBuilder, "create_masked_load", watched_load),
        patch.object(InterpreterBuilder, "create_masked_store", watched_store),
        patch.object(InterpreterBuilder, "create_barrier", lambda _: memory.barrier()),
    ):
        yield
