"""Causal depthwise convolution of width 2 to 4 with SiLU, as one op; a bias is left out on purpose.

Shapes: B rows, T tokens, C channels, S columns beside them (X in all), W taps; w_CW[:, W - 1] multiplies the token
itself. The decode state is the last W - 1 inputs, state_BWC. Documents (`cu_seqlens`, as in `gated_delta_rule`) do not
see each other.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from components.kernels.short_conv import launch

Activation = Literal["silu"] | None


def short_conv(
    x_BTC: Tensor,
    w_CW: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    state_BWC: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """y_BTC in the dtype of x, computed in float32 (float64 for float64).

    state_BWC: the W - 1 inputs before x (see `short_conv_state`); not together with `cu_seqlens`.
    Raises ValueError for shapes that do not fit.
    """
    _check(x_BTC, w_CW, cu_seqlens, state_BWC)
    if state_BWC is None:
        return _ShortConv.apply(x_BTC, w_CW, cu_seqlens, activation == "silu", 1)[0]
    longer = torch.cat([state_BWC.to(x_BTC.dtype), x_BTC], 1)
    return _ShortConv.apply(longer, w_CW, None, activation == "silu", 1)[0][:, state_BWC.shape[1] :]


def short_conv_beside(
    x_BTX: Tensor,
    w_CW: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    activation: Activation = "silu",
    uses: int = 1,
) -> tuple[Tensor, ...]:
    """`short_conv` of the first C columns of a joint projection, `uses` times, and a view of the others, rest_BTS.

    Results of several uses share their memory. Give each to one consumer: backward adds up their gradients, in float32,
    as it reads them, where autograd would first write their sum. The gradient of one that is not used is zeros. All
    gradients are written where the projection's backward wants them, in one tensor. Raises as `short_conv`.
    """
    _check(x_BTX[..., : len(w_CW)], w_CW, cu_seqlens, None)
    if not 1 <= uses <= 4:
        raise ValueError(f"short_conv_beside hands out its result 1 to 4 times, not {uses}")
    return _ShortConv.apply(x_BTX, w_CW, cu_seqlens, activation == "silu", uses)


def short_conv_state(x_BTC: Tensor, width: int, state_BWC: Tensor | None = None) -> Tensor:
    """The last W - 1 inputs after x (zeros before the start), from the state before x: what decoding continues with."""
    if state_BWC is None:
        state_BWC = x_BTC.new_zeros(x_BTC.shape[0], width - 1, x_BTC.shape[2])
    return torch.cat([state_BWC.to(x_BTC.dtype), x_BTC], 1)[:, -(width - 1) :].contiguous()


def short_conv_step(
    x_BC: Tensor, w_CW: Tensor, state_BWC: Tensor, *, activation: Activation = "silu"
) -> tuple[Tensor, Tensor]:
    """One token: y_BC and the new state_BWC."""
    window = torch.cat([state_BWC, x_BC[:, None].to(state_BWC.dtype)], 1)
    wide = torch.promote_types(x_BC.dtype, torch.float32)
    z = torch.einsum("bwc,cw->bc", window.to(wide), w_CW.to(wide))
    return (F.silu(z) if activation == "silu" else z).to(x_BC.dtype), window[:, 1:]


def _check(x: Tensor, w: Tensor, cu_seqlens: Tensor | None, state: Tensor | None) -> None:
    if x.ndim != 3 or w.ndim != 2 or w.shape[0] != x.shape[2] or not 2 <= w.shape[1] <= 4:
        raise ValueError(
            f"short_conv needs x (B, T, C) and w (C, W) with W from 2 to 4, not {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if state is not None and cu_seqlens is not None:
        raise ValueError("short_conv takes a state or cu_seqlens, not both: a state continues one document a row")
    if state is not None and state.shape != (x.shape[0], w.shape[1] - 1, x.shape[2]):
        raise ValueError(f"short_conv needs a state of shape (B, W - 1, C), not {tuple(state.shape)}")


def _position(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Each token's distance from its document's start, (B, T)."""
    B, T = x.shape[:2]
    if cu_seqlens is None:
        return torch.arange(T, device=x.device).expand(B, T)
    token = torch.arange(B * T, device=x.device)
    start = cu_seqlens.long()[torch.searchsorted(cu_seqlens.long(), token, right=True) - 1]
    return (token - start).view(B, T)


def _convolve(x: Tensor, w: Tensor, position: Tensor) -> Tensor:
    z = x * w[:, -1]
    for back in range(1, min(w.shape[1], x.shape[1])):
        z[:, back:] += torch.where((position[:, back:] >= back)[..., None], x[:, :-back], 0) * w[:, -1 - back]
    return z


def _in_triton(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float64


# Defined by their schemas: what `torch.library.custom_op` checks at every call takes longer than our launches.
_FORWARD, _BACKWARD = "hymo::short_conv", "hymo::short_conv_backward"
_TAGS, _DEVICES = (torch.Tag.pt2_compliant_tag,), ("cpu", "cuda")
_INPUTS = "Tensor x, Tensor w, Tensor? cu_seqlens, bool silu"  # backward: x with all of its columns
torch.library.define(_FORWARD, f"({_INPUTS}) -> Tensor", tags=_TAGS)
torch.library.define(_BACKWARD, f"(Tensor[] dys, Tensor d_rest, {_INPUTS}) -> (Tensor, Tensor)", tags=_TAGS)


@torch.library.impl(_FORWARD, _DEVICES)
def _forward(x: Tensor, w: Tensor, cu_seqlens: Tensor | None, silu: bool) -> Tensor:
    if _in_triton(x):
        return launch.forward(x, w, cu_seqlens, silu)
    wide = torch.promote_types(x.dtype, torch.float32)
    z = _convolve(x.to(wide), w.to(wide), _position(x, cu_seqlens))
    return (F.silu(z) if silu else z).to(x.dtype)


@torch.library.register_fake(_FORWARD)
def _(x, w, cu_seqlens, silu):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.impl(_BACKWARD, _DEVICES)
def _backward(
    dys: list[Tensor], d_rest: Tensor, x: Tensor, w: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    if _in_triton(x):
        return launch.backward(dys, d_rest, x, w, cu_seqlens, silu)
    wide, position = torch.promote_types(x.dtype, torch.float32), _position(x, cu_seqlens)
    dz, x_wide, w_wide = sum(dy.to(wide) for dy in dys), x[..., : len(w)].to(wide), w.to(wide)
    if silu:
        z = _convolve(x_wide, w_wide, position)
        s = z.sigmoid()
        dz = dz * s * (1 + z * (1 - s))
    dx, dw = dz * w_wide[:, -1], torch.zeros_like(w_wide)
    dw[:, -1] = (dz * x_wide).sum((0, 1))
    for back in range(1, min(w.shape[1], x.shape[1])):
        seen = torch.where((position[:, back:] >= back)[..., None], dz[:, back:], 0)
        dx[:, :-back] += seen * w_wide[:, -1 - back]
        dw[:, -1 - back] = (seen * x_wide[:, :-back]).sum((0, 1))
    return torch.cat([dx.to(x.dtype), d_rest], -1), dw.to(w.dtype)


@torch.library.register_fake(_BACKWARD)
def _(dys, d_rest, x, w, cu_seqlens, silu):
    return tuple(torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, w))


class _ShortConv(torch.autograd.Function):
    """As often as there are uses, and the columns beside the convolved ones, of which there may be none."""

    @staticmethod
    def forward(ctx, x_BTX: Tensor, w_CW: Tensor, cu_seqlens: Tensor | None, silu: bool, uses: int):
        ctx.save_for_backward(x_BTX, w_CW, cu_seqlens)
        ctx.silu = silu
        x_BTC, rest_BTS = x_BTX.tensor_split((len(w_CW),), -1)
        y_BTC = torch.ops.hymo.short_conv(x_BTC, w_CW, cu_seqlens, silu)
        return y_BTC, *(y_BTC.view_as(y_BTC) for _ in range(uses - 1)), rest_BTS

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        *dys_BTC, d_rest_BTS = gradients
        dx, dw = torch.ops.hymo.short_conv_backward(dys_BTC, d_rest_BTS, *ctx.saved_tensors, ctx.silu)
        return dx, dw, None, None, None
