"""The Triton form of the short convolution, host side."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from components.kernels.short_conv import kernels

# A program's; swept on an H200, see docs/kernels.md. Backward from several gradients has registers for sixteen programs
# a multiprocessor: with longer ones all those of 16,384 tokens of 1,280 channels are there at once.
TOKENS, TOKENS_OF_SEVERAL, CHANNELS = 64, 80, 128


def forward(x: Tensor, w: Tensor, cu_seqlens: Tensor | None, silu: bool) -> Tensor:
    x, w = _even(x), w.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = x.shape[1], x.shape[2], x.stride(1)
    options = _options(w, cu_seqlens, silu, TOKENS)
    kernels.short_conv(_programs(x, TOKENS), x, w, _distances(x, cu_seqlens), y, *sizes, **options)
    return y


def backward(
    dys: Sequence[Tensor], d_rest: Tensor, x: Tensor, w: Tensor, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """dx and dw from one to four gradients, which are added up. The first channels of x are convolved; `d_rest` is the
    gradient of the columns beside them."""
    (B, T, C), W = dys[0].shape, w.shape[1]
    dx, dw = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(w)
    dys, x, w = [dy.contiguous() for dy in dys], _even(x[..., :C]), w.contiguous()
    unread = [dys[0]] * (4 - len(dys))
    tokens = TOKENS if len(dys) == 1 else TOKENS_OF_SEVERAL
    blocks = B * triton.cdiv(T, tokens)
    shares = torch.empty(blocks, 4, C, dtype=torch.float32, device=x.device)
    kernels.short_conv_gradients(
        _programs(x, tokens), *dys, *unread, x, w, _distances(x, cu_seqlens), dx, shares,
        T, C, d_rest.shape[2], x.stride(1), USES=len(dys), **_options(w, cu_seqlens, silu, tokens),
    )  # fmt: skip
    kernels.reduce_shares(W * triton.cdiv(C, 64), shares, dw, blocks, C, W=W, ROWS=32, BC=64)
    if d_rest.shape[2]:
        _pass_on(_even(d_rest), dx)
    return dx, dw


def _pass_on(d_rest: Tensor, dx: Tensor) -> None:
    tokens, S = dx.shape[0] * dx.shape[1], d_rest.shape[2]
    programs = triton.cdiv(tokens, 16) * triton.cdiv(S, 128)
    kernels.pass_on(programs, d_rest, dx, tokens, dx.shape[2] - S, S, d_rest.stride(1), BT=16, BC=128)


def _even(x: Tensor) -> Tensor:
    """x itself if its tokens are evenly spaced over all rows and channels lie together, else a copy."""
    even = x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if even else x.contiguous()


def _programs(x: Tensor, tokens: int) -> int:
    return x.shape[0] * triton.cdiv(x.shape[1], tokens) * triton.cdiv(x.shape[2], CHANNELS)


def _options(w: Tensor, cu_seqlens: Tensor | None, silu: bool, tokens: int) -> dict:
    return {
        "W": w.shape[1],
        "BT": tokens,
        "BC": CHANNELS,
        "PACKED": cu_seqlens is not None,
        "SILU": silu,
        "num_warps": 1,
    }


def _distances(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Each token's place in its document, int32. Where rows are documents any tensor does: kernels do not read it."""
    if cu_seqlens is None:
        return x
    tokens, documents = x.shape[0] * x.shape[1], len(cu_seqlens) - 1
    distance = torch.empty(tokens, dtype=torch.int32, device=x.device)
    kernels.distances(
        triton.cdiv(tokens, 128), cu_seqlens, distance, tokens, documents, documents.bit_length(), BLOCK=128
    )
    return distance
