"""RMSNorm of what a recurrence gives, with its skip inside and a gate behind."""

from components.kernels.gated_norm.op import gated_norm

__all__ = ["gated_norm"]
