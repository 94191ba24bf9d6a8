"""Device memory of the steps since it was last asked for, by TorchTitan's quantities."""

import torch

GIB = 2**30


def memory_values(device: torch.device) -> dict[str, float]:
    """Peaks in GiB and percent of the device's memory since the last call, allocator retries and out-of-memory
    events; empty on the CPU."""
    if device.type != "cuda":
        return {}
    stats, total = torch.cuda.memory_stats(device), torch.cuda.get_device_properties(device).total_memory
    active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/active": active / GIB,
        "memory/active_share": 100 * active / total,
        "memory/reserved": reserved / GIB,
        "memory/reserved_share": 100 * reserved / total,
        "memory/retries": stats["num_alloc_retries"],
        "memory/ooms": stats["num_ooms"],
    }
