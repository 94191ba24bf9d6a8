"""From a recipe to a `Job`: TOML, its parents, overlays and flags become one frozen, validated dataclass."""

from recipes.job.load import load, load_or_exit
from recipes.job.record import completed, differences, refuse_unwritable, refused_changes, to_table, write_resolved
from recipes.job.sections import Job

__all__ = [
    "Job",
    "completed",
    "differences",
    "load",
    "load_or_exit",
    "refuse_unwritable",
    "refused_changes",
    "to_table",
    "write_resolved",
]
