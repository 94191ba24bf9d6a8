"""A family: a claim, what would refute it, and the recipes that decide. One folder, family.toml and a file a variant.

A variant's recipe holds its parent and the change, nothing else, and runs alone. What a report needs to know of it
stands in family.toml; paths there are relative to it.
"""

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import registry
from recipes.job.files import display
from registry import Problem, RecipeError

FAMILIES = Path("train_configs/ablations")
REFERENCE = "primary"  # what the reference is called among the variants

Quantity = Literal["active_parameters", "total_parameters", "flops", "layers", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Match:
    """One number of the variant's recipe is set so that it is as large as the reference, at every scale."""

    quantity: Quantity  # what is made equal
    key: str  # the number that is set, such as model.ffns.experts.hidden
    multiple_of: int = 1  # steps in which it may change
    factor: float = 1.0  # the variant's quantity over the reference's

    def __post_init__(self) -> None:
        if self.multiple_of < 1 or self.factor <= 0:
            raise ValueError("multiple_of must be at least 1 and factor above 0")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One change. `at_least` and `at_most` bound what the claim says of (its loss - the reference's), in nats."""

    about: str  # the change, in a few words
    at_least: float | None = None  # the claim needs a difference of at least this
    at_most: float | None = None  # ... of at most this
    match: tuple[Match, ...] = ()  # numbers adjusted to the reference, in order

    def __post_init__(self) -> None:
        if self.at_least is not None and self.at_most is not None:
            raise ValueError("state at_least or at_most, not both")


@dataclass(frozen=True, kw_only=True)
class Family:
    """family.toml."""

    claim: str  # in a sentence
    refuted_by: str  # what would refute it
    reference: str  # the recipe that variants are compared with
    overlays: tuple[str, ...] = ()  # laid first, before those of the command line
    seeds: int = 3  # runs of each variant
    columns: tuple[str, ...] = ()  # quantities reported besides loss (recipes/ablate/measure.py)
    variants: dict[str, Variant] = field(default_factory=dict)  # by the name of their file
    folder: Path = field(default=Path(), init=False, compare=False)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, not {self.seeds}")

    @property
    def name(self) -> str:
        return self.folder.name

    def recipe(self, variant: str) -> str:
        """The recipe file of a variant, or of the reference."""
        return self.path(self.reference if variant == REFERENCE else f"{variant}.toml")

    def path(self, name: str) -> str:
        return os.path.normpath(self.folder / name)

    def names(self) -> list[str]:
        return [REFERENCE, *self.variants]


def read_family(name: str) -> Family:
    """A family by the name of its folder in train_configs/ablations, or by a path to its folder. RecipeError with
    every problem."""
    folder = Path(name) if os.sep in name or Path(name, "family.toml").exists() else FAMILIES / name
    file = folder / "family.toml"
    if not file.exists():
        known = sorted(f.parent.name for f in FAMILIES.glob("*/family.toml"))
        message = registry.unknown("family", name, known) if name else f"which family? Known: {', '.join(known)}"
        raise RecipeError([Problem((), message, "command line")])
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecipeError([Problem((), f"not valid TOML: {error}", display(str(file)))]) from None
    return _parsed(table, folder, display(str(file)))


def _parsed(table: dict[str, Any], folder: Path, origin: str) -> Family:
    problems: list[Problem] = []
    family = registry.parse(Family, table, (), problems)
    if family is not None:
        object.__setattr__(family, "folder", folder)
        problems += [
            Problem(("variants", v), f"there is no {family.recipe(v)}; write it, or remove the variant")
            for v in family.variants
            if not Path(family.recipe(v)).exists()
        ]
    if problems:
        raise RecipeError([Problem(p.path, p.message, p.origin or origin) for p in problems])
    return family
