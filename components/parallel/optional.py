"""Optimisations that a recipe may ask for and a machine may refuse: one rule for all of them.

Each section ([fused_gdn], [moe_mixed_precision], [compile], [cuda_graph]) has `enable` and `on_failure`. "error" stops
the run with the reason; "plain" says so once and goes on without.
"""

import warnings
from collections.abc import Callable

import torch


class UnavailableError(ValueError):
    """What a recipe insists on cannot be had here; the message says what and why."""


def require_cuda() -> None:
    """RuntimeError without a CUDA device: nothing can be recorded then."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device")


def attempt(section: str, on_failure: str, turn_on: Callable[[], None]) -> bool:
    """Whether `turn_on` went through. Raises UnavailableError naming the section if it did not and `on_failure`
    is "error"."""
    try:
        turn_on()
    except Exception as error:  # compilers and drivers raise what they like
        reason = f"[{section}] cannot be switched on: {str(error).strip() or type(error).__name__}"
        if on_failure == "error":
            raise UnavailableError(f'{reason}; set enable = false, or on_failure = "plain" to run without') from error
        warnings.warn(f"{reason}; running without", stacklevel=2)
        return False
    return True
