"""Which Triton form of the gated delta rule runs which head widths, and with what configuration."""

import functools
from dataclasses import replace

import torch

from components.kernels.gated_delta_rule.launch import ALL_REGISTERS
from components.kernels.gated_delta_rule.launch_small import SmallHeads
from components.kernels.gated_delta_rule.launch_wide import WideHeads

CHUNKS = (16, 32, 64, 128)  # tokens, of PyTorch's form
MOST_KEYS = 128  # width that a Triton form takes
HOPPER = (9, 0)  # compute capability; older devices have registers and shared memory for less at once
TWELVE_PROGRAMS = 168  # registers a thread with which twelve programs of one warp fit a multiprocessor, not eight
MORE_PROGRAMS = {  # registers a thread with which four programs of four warps, or three, fit a multiprocessor, not two
    "map_registers": 128, "query_registers": 168, "key_registers": 168,
}  # fmt: skip
EXACT = WideHeads(  # float32: tiles twice as large
    query_block=32, key_block=32, output_stages=1, sweep_stages=1, query_stages=1, key_stages=1
)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Its compute capability; Hopper's where there is no such device, as in estimates made without one."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else HOPPER


def chunks(K: int, V: int) -> tuple[int, ...]:
    """How many tokens a chunk may hold, by head widths: the same on every device and in every dtype. A tile of 64 by 64
    does not fit the registers of small heads' one warp, nor chunks of 128 wide heads' shared memory; in chunks of 16
    these were never tried."""
    if K > MOST_KEYS:
        return CHUNKS
    return (16, 32) if max(K, V) <= 32 else (32, 64)


def check_chunk(K: int, V: int, chunk: int) -> None:
    """ValueError unless heads of these widths run in chunks of so many tokens (0: as many as was found best)."""
    offered = chunks(K, V)
    if chunk and chunk not in offered:
        raise ValueError(
            f"chunk = {chunk}: heads of key width {K} and value width {V} have kernels for chunks of "
            f"{', '.join(map(str, offered[:-1]))} and {offered[-1]} tokens; 0 takes what these were tuned to"
        )


def choose(
    K: int, V: int, dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] = HOPPER, chunk: int = 0
) -> SmallHeads | WideHeads | None:
    """The form for head widths, or None where there is none, in chunks of `chunk` tokens if it is not 0. It must not
    depend on B or T: packed documents have to give the bits of separate calls. ValueError for a chunk without a
    kernel."""
    if K > MOST_KEYS:
        return None
    tuned = _tuned(K, V, dtype, capability)
    if not chunk:
        return tuned
    check_chunk(K, V, chunk)
    if chunk == tuned.chunk:
        return tuned
    if isinstance(tuned, SmallHeads):  # programs of 64 tokens in `chunk_matrices`
        sizes = {"chunk": chunk, "chunks_per_program": 64 // chunk, "gradient_warps": chunk // 16}
        return replace(tuned, **sizes, summary_registers=ALL_REGISTERS)
    return replace(tuned, chunk=chunk, **dict.fromkeys(MORE_PROGRAMS, ALL_REGISTERS))


def _tuned(K: int, V: int, dtype: torch.dtype, capability: tuple[int, int]) -> SmallHeads | WideHeads:
    if max(K, V) <= 32:
        capped = capability >= HOPPER and dtype != torch.float32  # others would spill
        return SmallHeads(summary_registers=TWELVE_PROGRAMS) if capped else SmallHeads()
    if dtype == torch.float32:
        return EXACT
    return _wide_on_hopper(K, V, dtype) if capability >= HOPPER else _wide_before_hopper(K)


def _wide_on_hopper(K: int, V: int, dtype: torch.dtype) -> WideHeads:
    if K <= 64:
        registers = MORE_PROGRAMS if dtype == torch.bfloat16 else {}  # float16, converted as it is read, would spill
        return WideHeads(query_block=32, key_block=32, **registers)
    walk = {"sweep_block": 128, "sweep_warps": 8} if V % 128 == 0 else {}
    return WideHeads(**walk, output_stages=2, query_block=32, key_block=32)


def _wide_before_hopper(K: int) -> WideHeads:
    if K > 64:
        return WideHeads(
            chunk=32, sweep_block=32, query_block=32, key_block=32, sweep_warps=8, chunk_warps=8,
            output_stages=2, sweep_stages=2, query_stages=1, key_stages=1,
        )  # fmt: skip
    return WideHeads(
        chunk=32, query_block=32, key_block=32, chunk_warps=8,
        output_stages=2, sweep_stages=2, query_stages=2, key_stages=2,
    )  # fmt: skip
