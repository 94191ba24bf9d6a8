"""SiLU(gate) ⊙ up of one folded projection, as one op.

Its gradient is written where the projection's backward wants it, gate and up side by side. A compiler makes that a
concatenation which computes both halves everywhere: 0.33 ms for 32,768 rows of F = 2,304 on an H200, where the bytes
take 0.18. Shapes: F hidden.
"""

import torch
import triton
from torch import Tensor

from components.kernels.swiglu import kernels
from components.kernels.swiglu.reference import swiglu_reference

ROWS, COLUMNS = 4, 256  # a program's tile


def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2F) with gate before up, to (..., F) in the same dtype; computed in fp32 on CUDA."""
    return torch.ops.hymo.swiglu(gate_up)


def launch_forward(gate_up: Tensor) -> Tensor:
    """The Triton form."""
    gate_up = gate_up.contiguous()
    y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    kernels.swiglu[_grid(y)](gate_up, y, *_sizes(y), ROWS=ROWS, COLUMNS=COLUMNS)
    return y


def launch_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The Triton form: the gradient of `gate_up`."""
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    d_gate_up = torch.empty_like(gate_up)
    kernels.swiglu_gradient[_grid(dy)](dy, gate_up, d_gate_up, *_sizes(dy), ROWS=ROWS, COLUMNS=COLUMNS)
    return d_gate_up


@torch.library.custom_op("hymo::swiglu", mutates_args=())
def _forward(gate_up: Tensor) -> Tensor:
    return launch_forward(gate_up) if _in_triton(gate_up) else swiglu_reference(gate_up)


@_forward.register_fake
def _(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("hymo::swiglu_backward", mutates_args=())
def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    if _in_triton(gate_up):
        return launch_backward(dy, gate_up)
    gate, up = gate_up.chunk(2, -1)
    s = gate.sigmoid()
    return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], -1)


@_backward.register_fake
def _(dy, gate_up):
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx, dy: Tensor) -> Tensor:
    return torch.ops.hymo.swiglu_backward(dy, *ctx.saved_tensors)


_forward.register_autograd(_gradient, setup_context=_setup_context)


def _in_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _sizes(y: Tensor) -> tuple[int, int]:
    return y.numel() // max(y.shape[-1], 1), y.shape[-1]


def _grid(y: Tensor) -> tuple[int, int]:
    n, f = _sizes(y)
    return triton.cdiv(n, ROWS), triton.cdiv(f, COLUMNS)
