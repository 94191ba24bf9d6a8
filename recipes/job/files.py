"""Recipe files to one table: parents, overlays and their order, with the origin of every value.

The rule, for a child over its parent as for an overlay: a table that states `name` starts afresh, one that does not
edits what is there; lists are replaced whole. Order: root recipe, overlays (those that recipes name, then those asked
for), then each child down to the recipe asked for, so that a child that renames a part at full size still means the
same at proxy size.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from registry import Path, Problem, RecipeError, near_miss

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Layer:
    """What one file, or the command line, states."""

    origin: str
    table: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Layers laid over each other: the table, and who stated or last edited each value and table in it."""

    table: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)

    def origin(self, path: Path) -> str:
        """Who stated the value at `path`, or the nearest table around it; '' if nobody did."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return ""


def lay(layers: Iterable[Layer]) -> Recipe:
    recipe = Recipe()
    for layer in layers:
        _edit(recipe, recipe.table, layer.table, layer.origin, ())
    return recipe


def _edit(recipe: Recipe, table: dict[str, Any], delta: Mapping[str, Any], origin: str, path: Path) -> None:
    for key, value in delta.items():
        here = (*path, key)
        if not isinstance(value, Mapping):
            table[key] = value
        else:
            if isinstance(value.get("name"), str) or not isinstance(table.get(key), dict):
                table[key] = {}
                _forget(recipe.origins, here)
            _edit(recipe, table[key], value, origin, here)
        recipe.origins[here] = origin


def _forget(origins: dict[Path, str], path: Path) -> None:
    for stale in [p for p in origins if p[: len(path)] == path]:
        del origins[stale]


def read_layers(config_file: str, overlays: Iterable[str]) -> list[Layer]:
    """The recipe's root, the overlays, then its children in order. RecipeError where a file cannot be used."""
    (root, *children), named = _ancestry(config_file)
    return [root, *named, *(_read_overlay(o, None) for o in overlays), *children]


def _ancestry(config_file: str) -> tuple[list[Layer], list[Layer]]:
    """The recipe and its parents, root first, and the overlays that they name, in that order too."""
    chain: list[Layer] = []
    named: list[Layer] = []
    path, child = config_file, None
    while path is not None:
        if display(path) in (seen := [layer.origin for layer in chain]):
            circle = " -> ".join([*seen, display(path)])
            raise RecipeError([Problem(("base",), f"parents form a circle: {circle}; remove one base", child)])
        table = _read(path, ("base",), child)
        child, folder = display(path), os.path.dirname(path)
        base, overlays = _links(table, child)
        named = [_read_overlay(os.path.join(folder, name), child) for name in overlays] + named
        chain.append(Layer(child, table))
        path = base and os.path.join(folder, base)
    return chain[::-1], named


def _links(table: dict[str, Any], origin: str) -> tuple[str | None, list[str]]:
    """Takes out of a recipe's table its parent and its overlays: paths relative to the recipe's folder."""
    base, overlays = table.pop("base", None), table.pop("overlays", [])
    if base is not None and not isinstance(base, str):
        raise RecipeError([Problem(("base",), f'must be one file name, such as "hymo.toml", not {base!r}', origin)])
    if not isinstance(overlays, list) or not all(isinstance(name, str) for name in overlays):
        raise RecipeError([Problem(("overlays",), f"must be a list of file names, not {overlays!r}", origin)])
    return base, overlays


def _read_overlay(path: str, recipe: str | None) -> Layer:
    """`recipe` is the one that names it; None: the command line."""
    layer = Layer(display(path), _read(path, ("overlays",), recipe))
    for key in ("base", "overlays"):
        if key in layer.table:
            message = "an overlay has no parent and no overlays; it is laid over the root recipe"
            raise RecipeError([Problem((key,), message, layer.origin)])
    return layer


def _read(path: str, key: Path, recipe: str | None) -> dict[str, Any]:
    """The table of a file. `recipe` is the one that names it under `key`, for the message if it is not there."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        message = f"cannot read {display(path)} ({error.strerror}).{_near_file(path)}"
        raise RecipeError([Problem(key if recipe else (), message, recipe or COMMAND_LINE)]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([Problem((), f"not valid TOML: {error}", display(path))]) from None


def _near_file(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f" There is no folder {display(folder)}; paths are relative to the working directory {os.getcwd()}."
    return near_miss(os.path.basename(path), [f for f in os.listdir(folder) if f.endswith(".toml")])


def display(path: str) -> str:
    """A path as messages show it: relative to the working directory where it lies below it."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative
