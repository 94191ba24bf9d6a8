"""SiLU(gate) ⊙ up and its gradient; a program takes a tile of rows and columns. Shapes: N rows, F hidden."""

import triton
import triton.language as tl


@triton.jit
def swiglu(gate_up, y, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n, f, inside = _tile(N, F, ROWS, COLUMNS)
    gate = tl.load(gate_up + n * 2 * F + f, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * F + F + f, inside, other=0.0).to(tl.float32)
    tl.store(y + n * F + f, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), inside)


@triton.jit
def swiglu_gradient(dy, gate_up, d_gate_up, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n, f, inside = _tile(N, F, ROWS, COLUMNS)
    gate = tl.load(gate_up + n * 2 * F + f, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * F + F + f, inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + n * F + f, inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate = grad * up * s * (1 + gate * (1 - s))
    d_up = grad * gate * s
    tl.store(d_gate_up + n * 2 * F + f, d_gate.to(d_gate_up.dtype.element_ty), inside)
    tl.store(d_gate_up + n * 2 * F + F + f, d_up.to(d_gate_up.dtype.element_ty), inside)


@triton.jit
def _tile(N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column numbers of a program's tile, and which of them exist."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return n, f, (n < N) & (f < F)
