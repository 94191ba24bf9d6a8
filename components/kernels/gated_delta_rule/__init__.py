"""The gated delta rule: see README.md for what is here and how it is derived."""

from components.kernels.gated_delta_rule.op import gated_delta_rule
from components.kernels.gated_delta_rule.recurrent import gated_delta_rule_step

__all__ = ["gated_delta_rule", "gated_delta_rule_step"]
