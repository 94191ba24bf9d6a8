"""Initial scales that every part shares."""

LINEAR_STD = 0.02  # of every linear layer and embedding


def residual_std(branches: int) -> float:
    """Standard deviation of an output projection into a residual stream that `branches` branches add to: the
    stream's variance then does not grow with depth (GPT-2)."""
    return LINEAR_STD * branches**-0.5
