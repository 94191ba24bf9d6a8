"""Arguments to a `Job`: read the files, lay them, read the flags, parse, check, and tell every problem at once."""

import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

import registry
from recipes.job.checks import run_checks
from recipes.job.files import COMMAND_LINE, Layer, Recipe, lay, read_layers
from recipes.job.flags import Early, early_flags, parse_flags
from recipes.job.sections import Job
from registry import Problem, RecipeError

FLAGS_ONLY = ("config_file", "overlay")


def load(arguments: Sequence[str], *, needs_data: bool = True, ranks: int | None = None) -> Job:
    """The job that these arguments (without the program's name) ask for.

    `needs_data` looks at the tokenizer and the prepared shards on disk too. `ranks` the run will have; None takes
    torchrun's WORLD_SIZE, or 1. Raises RecipeError with every problem, each saying where the value stands; `--help`
    prints every flag of the recipe and exits.
    """
    early = early_flags(arguments)
    layers = [*_files(early), Layer(COMMAND_LINE, early.table)]
    recipe = lay(layers)
    _discover(recipe)
    problems = _flags_in_files(recipe)
    flags = parse_flags(Job, recipe.table, early.rest, problems)
    if early.config_file is None:
        message = "which recipe? name it: --job.config_file train_configs/….toml"
        raise RecipeError([Problem((), message, COMMAND_LINE)])
    recipe = lay([*layers, Layer(COMMAND_LINE, flags)])
    sections = _sections(recipe, early, problems)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks
    problems += run_checks(sections, needs_data=needs_data, ranks=ranks)
    if problems:
        raise RecipeError(_located(problem, recipe) for problem in problems)
    return Job(**sections)


def load_or_exit(arguments: Sequence[str], *, needs_data: bool = True, ranks: int | None = None) -> Job:
    """`load` for a command: problems go to stderr, one a line, from one rank a node, and the exit status is 2."""
    try:
        return load(arguments, needs_data=needs_data, ranks=ranks)
    except RecipeError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr)
        sys.exit(2)


def _files(early: Early) -> list[Layer]:
    return read_layers(early.config_file, early.overlay) if early.config_file else []


def _discover(recipe: Recipe) -> None:
    """Import the components and `[job] imports`, from the installed packages and the working directory. An error
    inside such a module propagates with its traceback: it is a fault in code, not in the recipe."""
    imports = _job_table(recipe).get("imports", ())
    imports = [name for name in imports if isinstance(name, str)] if isinstance(imports, list) else []
    registry.discover()
    for name in imports:
        try:
            registry.discover([name])
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            message = (
                f"no module {name!r} in {os.getcwd()} or among the installed packages; install it or set PYTHONPATH"
            )
            raise RecipeError([_located(Problem(("job", "imports"), message), recipe)]) from None


def _job_table(recipe: Recipe) -> dict[str, Any]:
    table = recipe.table.get("job", {})
    if not isinstance(table, dict):
        raise RecipeError([_located(Problem(("job",), f"must be a table, not {table!r}"), recipe)])
    return table


def _flags_in_files(recipe: Recipe) -> list[Problem]:
    stated = [key for key in FLAGS_ONLY if key in _job_table(recipe)]
    return [Problem(("job", key), f"is a flag (--job.{key}), not a key of a recipe; remove it") for key in stated]


def _sections(recipe: Recipe, early: Early, problems: list[Problem]) -> dict[str, Any]:
    """Every section of `Job`, None where it has problems."""
    hints = typing.get_type_hints(Job, include_extras=True)
    for section in recipe.table:
        if section not in hints:
            problems.append(Problem((section,), registry.unknown("section", section, hints)))
    given = {"dump_folder": _dump_folder(early)} | _job_table(recipe)
    table = recipe.table | {"job": given | {"config_file": early.config_file, "overlay": early.overlay}}
    return {name: registry.parse(hints[name], table.get(name, {}), (name,), problems) for name in hints}


def _dump_folder(early: Early) -> str:
    """outputs/<recipe>, and a folder of its own for each overlay: another size is another run."""
    return f"outputs/{'-'.join(File(name).stem for name in (early.config_file, *early.overlay))}"


def _located(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the file or flag that stated the value."""
    return problem if problem.origin else dataclasses.replace(problem, origin=recipe.origin(problem.path))
