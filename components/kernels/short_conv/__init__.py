"""Causal depthwise convolution of a few taps with SiLU."""

from components.kernels.short_conv.op import short_conv, short_conv_beside, short_conv_state, short_conv_step

__all__ = ["short_conv", "short_conv_beside", "short_conv_state", "short_conv_step"]
