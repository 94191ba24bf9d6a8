"""From seconds to tokens a second, TFLOP/s and MFU.

MFU is set against the peak that the vendor states for dense bf16 matrix products, by device name. A device that is not
listed, a slice of one (MIG), and the CPU have none: MFU is then None, shown as N/A, and never a guess.
The FLOPs of a token are the model's to count; this only divides.
"""

import re
from dataclasses import dataclass

# Dense bf16 TFLOP/s (without structured sparsity) of the vendors' data sheets. The first pattern that is found counts.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\bG?H200\b", 989.4),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.5),
    (r"\bH100\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\bA[18]00\b", 312.0),
    (r"\bL40S\b", 362.05),
    (r"\bL4\b", 121.0),
    (r"\bA10\b", 125.0),
    (r"\bA40\b", 149.7),
    (r"\bRTX 4090\b", 165.2),
    (r"\bMI300X\b", 1307.4),
    (r"\bMI325X\b", 1307.4),
)


def peak_tflops(device_name: str) -> float | None:
    """The stated dense bf16 peak of `torch.cuda.get_device_name()`, in TFLOP/s; None where there is none to state."""
    if "MIG" in device_name:
        return None
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, device_name)), None)


@dataclass(frozen=True)
class Throughput:
    """tps: tokens a second and device. tflops: model TFLOP/s a device. mfu: percent of the peak, None if unknown."""

    tps: float
    tflops: float
    mfu: float | None


def throughput(tokens: int, seconds: float, ranks: int, flops_per_token: float, peak: float | None) -> Throughput:
    """`tokens` trained by all `ranks` together in `seconds`; `peak` in TFLOP/s of one device."""
    tps = tokens / seconds / ranks
    tflops = tps * flops_per_token / 1e12
    return Throughput(tps, tflops, 100 * tflops / peak if peak is not None else None)
