"""From a recipe to a `Job`: TOML, its parents, overlays and flags become one frozen, validated dataclass."""

from recipes.job.sections import Job

__all__ = ["Job"]
