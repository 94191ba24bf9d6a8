"""The Triton form of the gated norm, host side. Shapes: N = B T tokens, H heads, V head width."""

import torch
import triton
from torch import Tensor

from components.kernels.gated_norm import kernels

# Elements of a tile, warps, and of backward the most programs: six on each SM of an H200 fit (docs/kernels.md).
FORWARD_TILE, FORWARD_WARPS = 2048, 4
BACKWARD_TILE, BACKWARD_WARPS, BACKWARD_PROGRAMS = 1024, 4, 792


def forward(o: Tensor, v: Tensor | None, D: Tensor | None, weight: Tensor | None, gate: Tensor, eps: float) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    tokens, inputs, strides, sizes = _problem(o, v, D, weight, gate, FORWARD_TILE)
    programs = triton.cdiv(tokens, sizes["R"] // sizes["BH"]) * (sizes["H"] // sizes["BH"])
    kernels.gated_norm(programs, *inputs, y, tokens, *strides, eps, **sizes, num_warps=FORWARD_WARPS)
    return y


def backward(
    dy: Tensor, o: Tensor, v: Tensor | None, D: Tensor | None, weight: Tensor | None, gate: Tensor, eps: float
) -> list[Tensor]:
    """Gradients of o and the gate; of v and D where there are any; of the weight where there is one."""
    do, dv, dD, dweight, d_gate = (None if x is None else _dense_like(x) for x in (o, v, D, weight, gate))
    tokens, inputs, strides, sizes = _problem(o, v, D, weight, gate, BACKWARD_TILE)
    tile, sums = sizes["R"] // sizes["BH"], sizes["H"] + sizes["V"]
    span = triton.cdiv(tokens, BACKWARD_PROGRAMS * tile) * tile
    programs = triton.cdiv(tokens, max(span, 1))
    shares = torch.empty(programs, sums, dtype=torch.float32, device=o.device)
    kernels.gated_norm_gradients(
        programs, dy.contiguous(), *inputs, do, _given(dv, do), d_gate, shares, tokens, span, *strides, eps, **sizes,
        num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    present = {name: sizes[name] for name in ("H", "V", "SKIP", "WEIGHT")}
    if D is not None or weight is not None:
        kernels.reduce_shares(
            triton.cdiv(sums, 8), shares, _given(dD, do), _given(dweight, do), programs, **present, ROWS=512, BC=8,
            num_warps=8,
        )  # fmt: skip
    return [x for x in (do, d_gate, dv, dD, dweight) if x is not None]


def _problem(
    o: Tensor, v: Tensor | None, D: Tensor | None, weight: Tensor | None, gate: Tensor, tile: int
) -> tuple[int, tuple[Tensor, ...], tuple[int, int], dict[str, int]]:
    """Tokens, a kernel's inputs, the strides between tokens of v and gate, and its constants. A tile holds as many
    heads as can be without part of one left over. What is not there no kernel reads: any tensor takes its place."""
    H, V = o.shape[2:]
    padded = triton.next_power_of_2(V)
    rows = max(1, tile // padded)
    o_NI, gate_NI = _tokens(o, H * V).contiguous(), _tokens(gate, H * V)
    v_NI = o_NI if v is None else _tokens(v, H * V)
    inputs = o_NI, v_NI, _given(D, o_NI).contiguous(), _given(weight, o_NI).contiguous(), gate_NI
    sizes = {"H": H, "V": V, "BV": padded, "R": rows, "BH": min(rows, H & -H)}
    flags = {"SKIP": v is not None, "WEIGHT": weight is not None}
    return len(o_NI), inputs, (v_NI.stride(0), gate_NI.stride(0)), sizes | flags


def _tokens(x: Tensor, width: int) -> Tensor:
    """(N, width): a view if tokens are evenly spaced and the features of each lie together, else a copy."""
    x_NI = x.reshape(-1, width)
    return x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()


def _given(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x


def _dense_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
