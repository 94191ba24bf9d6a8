"""The Triton forms of the gated delta rule, host side: what small and wide heads share, and the choice between them.

No host synchronisation, no tuning at run time: sizes of buffers follow from shapes alone. What forward keeps for
backward lies in one buffer, the op's third output.
"""

from abc import ABC, abstractmethod

import torch
import triton.language as tl
from torch import Tensor

from components.kernels.gated_delta_rule import tiles
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.launcher import Known

Gradients = tuple[Tensor | None, ...]
Sizes = list[tuple[int, torch.dtype]]  # elements, a multiple of 16 bytes of them except at the end of a list, and dtype


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
        self._known: dict[tuple, Known] = {}

    @abstractmethod
    def kept(self) -> Sizes:
        """Elements and dtype of each tensor that forward keeps for backward."""

    @abstractmethod
    def forward(self, x: Inputs, return_state: bool) -> tuple[Tensor, Tensor, Tensor]:
        """o_BTHV, final_state_LHKV (empty unless asked for), and the buffer of what backward needs."""

    @abstractmethod
    def backward(self, x: Inputs, buffer: Tensor, do_BTHV: Tensor, dfinal_LHKV: Tensor | None) -> Gradients:
        """Gradients of q, k, v, a, b, A_log, dt_bias and the initial state (None without one)."""

    def known(self, *call) -> Known:
        """The compiled kernels of calls that are alike in what the inputs' layout leaves open: flags, other tensors."""
        call = tuple((x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in call)
        return self._known.setdefault(call, {})

    def kept_bytes(self) -> int:
        return _bytes(self.kept())

    def kept_in(self, buffer: Tensor) -> list[Tensor]:
        return _pieces(buffer, self.kept())

    def new_pieces(self, sizes: Sizes) -> list[Tensor]:
        """Tensors of one dimension that share an allocation."""
        return _pieces(self.new(_bytes(sizes), dtype=torch.uint8), sizes)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def new_outputs(self, x: Inputs, return_state: bool) -> tuple[Tensor, Tensor]:
        state = self.new(self.documents, self.H, self.K, self.V) if return_state else self.new(0)
        return torch.empty_like(x.v_BTHV, memory_format=torch.contiguous_format), state

    def new_gradients(self, x: Inputs) -> list[Tensor]:
        """Buffers for dq, dk, dv, da, db, dA_log, ddt_bias: those of q and k one a value head, in float32 where several
        are to be summed."""
        dtype = x.q_BTGK.dtype if self.G == self.H else torch.float32
        dq, dk = (self.new(self.B, self.T, self.H, self.K, dtype=dtype) for _ in range(2))
        others = (x.v_BTHV, x.a_BTH, x.b_BTH, x.A_log_H, x.dt_bias_H)
        return [dq, dk, *(torch.empty_like(y, memory_format=torch.contiguous_format) for y in others)]

    def where(self, x: Inputs, known: Known) -> tuple[Tensor, Tensor, int]:
        """Documents' starts, each segment slot's document, and T. Where rows are documents kernels do not read the
        first two, and any tensor will do."""
        if not self.packed:
            return x.v_BTHV, x.v_BTHV, self.T
        slots = self.new(self.n_slots, dtype=torch.int32)
        tiles.find_documents(
            ceil_div(self.n_slots, 128), x.starts_L1, slots, self.n_slots, self.documents,
            self.documents.bit_length(), L=self.L, BLOCK=128, known=known,
        )  # fmt: skip
        return x.starts_L1, slots, self.T

    def gates(
        self, x: Inputs, vectors: Tensor, strides: tuple[int, int, int], where: tuple[Tensor, Tensor, int], known: Known
    ) -> None:
        """`strides` of a chunk, a token and a vector."""
        tiles.gates(
            self.over_gates, x.a_BTH, x.b_BTH, x.A_log_H, x.dt_bias_H, vectors, *where,
            self.a_stride, self.b_stride, **self.gated,
            CHUNK=strides[0], TOKEN=strides[1], VECTOR=strides[2], num_warps=1, known=known,
        )  # fmt: skip

    def reduce_shares(self, shares: Tensor, dA_log: Tensor, ddt_bias: Tensor, known: Known) -> None:
        n = len(shares) // (2 * self.H)
        tiles.reduce_shares(self.H, shares, dA_log, ddt_bias, n, H=self.H, BLOCK=128, known=known)

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
    return other if x is None else x.contiguous()


def _bytes(sizes: Sizes) -> int:
    return sum(size * dtype.itemsize for size, dtype in sizes)


def _pieces(buffer: Tensor, sizes: Sizes) -> list[Tensor]:
    pieces = buffer.split([size * dtype.itemsize for size, dtype in sizes])
    return [piece.view(dtype) for piece, (_, dtype) in zip(pieces, sizes, strict=True)]


def _dense(x: Tensor) -> Tensor:
    """x itself if its tokens are evenly spaced over all rows and each token's heads lie together, else a copy."""
    inner = x.shape[3] if x.ndim == 4 else 1
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    together = x.stride(-1) == 1 and (x.ndim == 3 or x.stride(2) == inner)
    return x if even and together else x.contiguous()


def dense(x: Inputs) -> Inputs:
    """The inputs as kernels read them."""
    tensors = x.q_BTGK, x.k_BTGK, x.v_BTHV, x.a_BTH, x.b_BTH, x.A_log_H, x.dt_bias_H
    starts = None if x.starts_L1 is None else x.starts_L1.contiguous()
    even = [*map(_dense, tensors[:5]), *(y.contiguous() for y in tensors[5:])]
    if starts is x.starts_L1 and all(y is z for y, z in zip(even, tensors, strict=True)):
        return x
    return Inputs(*even, x.initial_state_LHKV, starts, x.scale, x.chunk)
