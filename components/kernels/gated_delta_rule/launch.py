"""The Triton forms of the gated delta rule, host side: what small and wide heads share, and the choice between them.

No host synchronisation, no tuning at run time: sizes of buffers follow from shapes alone. What forward keeps for
backward lies in one buffer, the op's third output. What is launched differs from call to call in addresses alone, so
the launches of a kind of call are worked out once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from components.kernels.gated_delta_rule import tiles
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.launcher import Launches, Taken

ALL_REGISTERS = 255  # of a thread
Gradients = tuple[Tensor | None, ...]
Sizes = list[tuple[int, torch.dtype]]  # elements, a multiple of 16 bytes of them except at the end of a list, and dtype


class Pieces:
    """Tensors of one dimension that share an allocation, a buffer of `bytes` bytes."""

    def __init__(self, sizes: Sizes):
        self.dtypes = [dtype for _, dtype in sizes]
        self.each = [size * dtype.itemsize for size, dtype in sizes]
        *self.offsets, self.bytes = accumulate(self.each, initial=0)

    def of(self, buffer: Tensor) -> list[Tensor]:
        return [piece.view(dtype) for piece, dtype in zip(buffer.split(self.each), self.dtypes, strict=True)]

    def addresses(self, buffer: Tensor) -> list[int]:
        start = buffer.data_ptr()
        return [start + offset for offset in self.offsets]


class Launch(ABC):
    """What follows from the layout of dense inputs alone: sizes, buffers, the keyword arguments that kernels share. C
    tokens a chunk, L a segment."""

    def __init__(self, x: Inputs, C: int, L: int):
        self.C, self.L, self.device = C, L, x.v_BTHV.device
        self.B, self.T, self.H, self.V = x.v_BTHV.shape
        self.G, self.K = x.q_BTGK.shape[2:]
        self.BK = padded(self.K)
        self.q_stride, self.k_stride = x.q_BTGK.stride(1), x.k_BTGK.stride(1)
        self.v_stride, self.a_stride, self.b_stride = (y.stride(1) for y in (x.v_BTHV, x.a_BTH, x.b_BTH))
        self.packed = x.starts_L1 is not None
        self.documents = len(x.starts_L1) - 1 if self.packed else self.B
        self.tokens = self.B * self.T
        self.n_chunks = self.tokens // C + self.documents
        self.n_slots = self.tokens // L + self.documents if self.packed else self.B * ceil_div(self.T, L)
        self.exact = x.v_BTHV.dtype == torch.float32
        self.compute_dtype = torch.float32 if self.exact else torch.bfloat16
        self.numbers = {
            "CT": tl.float32 if self.exact else tl.bfloat16,
            "PRECISION": "tf32x3" if self.exact else "tf32",
        }
        self.gated = {"H": self.H, "BH": 16, "C": C, "L": L, "PACKED": self.packed}  # a program: a chunk, BH heads
        self.over_gates = self.n_slots * (L // C) * ceil_div(self.H, self.gated["BH"])
        self._launches: dict[tuple, Launches] = {}  # by what the layout leaves open

    @abstractmethod
    def kept_sizes(self) -> Sizes:
        """Of each tensor that forward keeps for backward."""

    @abstractmethod
    def backward_sizes(self) -> Sizes:
        """Of each tensor that backward works in."""

    @abstractmethod
    def launch_forward(
        self, taken: Taken, x: Inputs, kept: list[Tensor], slots: Tensor, *tensors: Tensor | None
    ) -> None:
        """`tensors`: o and the final state (None unless asked for)."""

    @abstractmethod
    def launch_backward(
        self, taken: Taken, x: Inputs, kept: list[Tensor], slots: Tensor, *tensors: Tensor | None
    ) -> None:
        """`tensors`: those of `backward_sizes`, gradients of o and the final state (or None), and what to fill: the
        gradients of `new_gradients`."""

    @cached_property
    def kept(self) -> Pieces:
        return Pieces(self.kept_sizes())

    @cached_property
    def forward_scratch(self) -> Pieces:
        return Pieces([self.slots])

    @cached_property
    def backward_scratch(self) -> Pieces:
        return Pieces([self.slots, *self.backward_sizes()])

    @property
    def slots(self) -> tuple[int, torch.dtype]:
        """Each segment slot's document, if they are packed."""
        return ceil_div(self.n_slots, 4) * 4 if self.packed else 0, torch.int32

    def forward(self, x: Inputs, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """o_BTHV, final_state_LHKV (None unless asked for), and the buffer of what backward needs."""
        o = self.new_like(x.v_BTHV)
        final = self.new(self.documents, self.H, self.K, self.V) if return_state else None
        kept = self.new_bytes(self.kept)
        self.repeat(self.launch_forward, (return_state,), x, kept, self.forward_scratch, o, final)
        return o, final, kept

    def backward(self, x: Inputs, kept: Tensor, do_BTHV: Tensor, dfinal_LHKV: Tensor | None) -> Gradients:
        """Gradients of q, k, v, a, b, A_log, dt_bias and the initial state (None without one)."""
        do = do_BTHV.contiguous()
        dfinal = None if dfinal_LHKV is None else dfinal_LHKV.contiguous()
        kind = tuple(None if y is None else (y.dtype, y.data_ptr() % 16) for y in (do, dfinal))
        gradients = self.new_gradients(x)
        self.repeat(self.launch_backward, kind, x, kept, self.backward_scratch, do, dfinal, *gradients)
        dq, dk, *others = gradients
        return self.sum_groups(dq, x.q_BTGK), self.sum_groups(dk, x.k_BTGK), *others

    def repeat(
        self, launches: Callable, kind: tuple, x: Inputs, kept: Tensor, pieces: Pieces, *others: Tensor | None
    ) -> None:
        """`launches`, with scratch of `pieces`: worked out by the first call of a `kind` and taken from it by the next.
        Calls of one kind have to differ in addresses and scale alone."""
        scratch, kind = self.new_bytes(pieces), (launches.__name__, *kind)
        known = self._launches.get(kind)
        if known is not None:
            addresses = [0 if y is None else y.data_ptr() for y in (*x.tensors(), *others)]
            known([x.scale, *addresses, *self.kept.addresses(kept), *pieces.addresses(scratch)])
            return
        # Views, so that a tensor given twice is two: another call's may be.
        inputs, others = ([None if y is None else y.detach() for y in z] for z in (x.tensors(), others))
        kept, scratch, taken = self.kept.of(kept), pieces.of(scratch), []
        launches(taken, Inputs(*inputs, x.scale, x.chunk), kept, *scratch, *others)
        if taken:
            self._launches[kind] = Launches(taken, [x.scale, *inputs, *others, *kept, *scratch])

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def new_like(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def new_bytes(self, pieces: Pieces) -> Tensor:
        return self.new(pieces.bytes, dtype=torch.uint8) if pieces.bytes else self.nothing

    @cached_property
    def nothing(self) -> Tensor:
        return self.new(0, dtype=torch.uint8)

    def new_gradients(self, x: Inputs) -> list[Tensor | None]:
        """Buffers for dq, dk, dv, da, db, dA_log, ddt_bias and the initial state's, if there is one: those of q and k
        one a value head, in float32 where several are to be summed."""
        dtype = x.q_BTGK.dtype if self.G == self.H else torch.float32
        dq, dk = (self.new(self.B, self.T, self.H, self.K, dtype=dtype) for _ in range(2))
        others = x.v_BTHV, x.a_BTH, x.b_BTH, x.A_log_H, x.dt_bias_H, x.initial_state_LHKV
        return [dq, dk, *(None if y is None else self.new_like(y) for y in others)]

    def where(self, x: Inputs, slots: Tensor, taken: Taken) -> tuple[Tensor, Tensor, int]:
        """Documents' starts, each segment slot's document, and T. Where rows are documents kernels do not read the
        first two, and any tensor will do."""
        if not self.packed:
            return x.v_BTHV, x.v_BTHV, self.T
        tiles.find_documents(
            ceil_div(self.n_slots, 128), x.starts_L1, slots, self.n_slots, self.documents,
            self.documents.bit_length(), L=self.L, BLOCK=128, taken=taken,
        )  # fmt: skip
        return x.starts_L1, slots, self.T

    def gates(
        self, x: Inputs, vectors: Tensor, strides: tuple[int, int, int], where: tuple[Tensor, Tensor, int], taken: Taken
    ) -> None:
        """`strides` of a chunk, a token and a vector."""
        tiles.gates(
            self.over_gates, x.a_BTH, x.b_BTH, x.A_log_H, x.dt_bias_H, vectors, *where,
            self.a_stride, self.b_stride, **self.gated,
            CHUNK=strides[0], TOKEN=strides[1], VECTOR=strides[2], num_warps=1, taken=taken,
        )  # fmt: skip

    def reduce_shares(self, shares: Tensor, dA_log: Tensor, ddt_bias: Tensor, taken: Taken) -> None:
        n = len(shares) // (2 * self.H)
        tiles.reduce_shares(self.H, shares, dA_log, ddt_bias, n, H=self.H, BLOCK=128, taken=taken)

    def sum_groups(self, d_BTHK: Tensor, like_BTGK: Tensor) -> Tensor:
        """The gradient of a query or key, summed over the value heads that read it."""
        if d_BTHK.shape == like_BTGK.shape:
            return d_BTHK
        return d_BTHK.unflatten(2, (like_BTGK.shape[2], -1)).sum(3).to(like_BTGK.dtype)


def ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def padded(width: int) -> int:
    """The power of two that holds `width` elements, at least 16: what a tile of a product takes."""
    return max(16, 1 << (int(width) - 1).bit_length())


def given(x: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's pointer argument: x, or any tensor where the kernel will not read it."""
    return other if x is None else x


def _dense(x: Tensor) -> Tensor:
    """x itself if its tokens are evenly spaced over all rows and each token's heads lie together, else a copy."""
    inner = x.shape[3] if x.ndim == 4 else 1
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    together = x.stride(-1) == 1 and (x.ndim == 3 or x.stride(2) == inner)
    return x if even and together else x.contiguous()


def dense(x: Inputs) -> Inputs:
    """The inputs as kernels read them: x itself if none has to be copied, which its layout says."""
    *tokens, A_log, dt_bias, initial, starts = tensors = x.tensors()
    whole = [None if y is None else y.contiguous() for y in (A_log, dt_bias, initial, starts)]
    even = [*map(_dense, tokens), *whole]
    if all(y is z for y, z in zip(even, tensors, strict=True)):
        return x
    return Inputs(*even, x.scale, x.chunk)
