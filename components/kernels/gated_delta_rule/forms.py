"""Which Triton form of the gated delta rule runs which head widths, and with what configuration."""

import functools

import torch

from components.kernels.gated_delta_rule.launch_small import SmallHeads
from components.kernels.gated_delta_rule.launch_wide import WideHeads

HOPPER = (9, 0)  # compute capability; older devices have registers and shared memory for less at once
EXACT = WideHeads(  # float32: tiles twice as large
    query_block=32, key_block=32, output_stages=1, sweep_stages=1, query_stages=1, key_stages=1
)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Its compute capability; Hopper's where there is no such device, as in estimates made without one."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else HOPPER


def choose(
    K: int, V: int, dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] = HOPPER
) -> SmallHeads | WideHeads | None:
    """The form for head widths, or None where there is none. It must not depend on B or T: packed documents have to
    give the bits of separate calls."""
    if K > 128:
        return None
    if max(K, V) <= 32:
        return SmallHeads() if capability >= HOPPER else SmallHeads(recompute_stages=1, gradient_stages=1)
    if dtype == torch.float32:
        return EXACT
    return _wide_on_hopper(K, V) if capability >= HOPPER else _wide_before_hopper(K)


def _wide_on_hopper(K: int, V: int) -> WideHeads:
    if K <= 64:
        return WideHeads(key_block=32)
    walk = {"sweep_block": 128, "sweep_warps": 8} if V % 128 == 0 else {}
    return WideHeads(**walk, output_stages=2, query_block=32, key_block=32)


def _wide_before_hopper(K: int) -> WideHeads:
    if K > 64:
        return WideHeads(
            chunk=32, sweep_block=32, query_block=32, key_block=32, sweep_warps=8, chunk_warps=8,
            output_stages=2, sweep_stages=2, query_stages=1, key_stages=1,
        )  # fmt: skip
    return WideHeads(
        chunk=32, query_block=32, key_block=32, output_stages=2, sweep_stages=2, query_stages=2, key_stages=2
    )
