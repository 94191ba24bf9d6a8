"""Flags from a recipe: every key is a flag, also the fields of the components that the recipe names.

`--training.steps 10`, `--compile.enable`, `--compile.no_enable`, `--compile.enable=true`,
`--model.mixers.gdn.head_dim 64`, `--validation.sources a b`. tyro reads them and prints `--help`; their words become
the values TOML would give, so that a wrong value is reported by the same parser, in the same list, as one in a file.

`--job.config_file`, `--job.overlay`, `--job.imports` and every `--….name` decide which flags there are, so they are
read first.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tyro

import registry
from recipes.job.files import COMMAND_LINE
from registry import Component, Path, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Early:
    """The flags that decide which other flags there are, and the arguments that are left."""

    config_file: str | None
    overlay: tuple[str, ...]
    table: dict[str, Any]  # imports and names, as a recipe would state them
    rest: tuple[str, ...]


def early_flags(arguments: Sequence[str]) -> Early:
    """Split off the flags that choose files, modules and components; exits with status 2 if one lacks a value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--job.config_file")
    parser.add_argument("--job.overlay", action="append")
    parser.add_argument("--job.imports", nargs="*")
    for flag in {a.split("=")[0] for a in arguments if a.startswith("--") and a.split("=")[0].endswith(".name")}:
        parser.add_argument(flag)
    found, rest = parser.parse_known_args(arguments)
    values = vars(found)
    config_file, overlay = values.pop("job.config_file", None), tuple(values.pop("job.overlay", ()))
    return Early(config_file, overlay, _nest({tuple(k.split(".")): v for k, v in values.items()}), tuple(rest))


def split_options(options: type[T], command: str, arguments: Sequence[str]) -> tuple[T, list[str]]:
    """A command's own options, and the arguments that are left for the recipe. Prints the help or what is wrong with
    them, and ends, as tyro does; `command` is what usage calls it."""
    return tyro.cli(options, prog=command, args=arguments, return_unknown_args=True, use_underscores=True)


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """The arguments less a flag of one value, as `--flag value` or `--flag=value`."""
    kept, given = [], iter(arguments)
    for word in given:
        if word == flag:
            next(given, None)
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept


@dataclass(frozen=True)
class Leaf:
    """One key that is a flag: its type, and its value if no flag is given (None if it has none)."""

    path: Path
    annotation: Any  # without None
    optional: bool
    value: Any
    comment: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


def parse_flags(
    job: type, table: Mapping[str, Any], arguments: Sequence[str], problems: list[Problem]
) -> dict[str, Any]:
    """What the flags state, as a table. Flags that do not exist go to `problems`; `--help` prints and exits."""
    leaves = {leaf.key: leaf for leaf in _leaves(job, table, (), "")}
    given, strangers = tyro.cli(
        _flag_type(leaves.values()),
        prog="python -m recipes.pretrain",
        args=[_positive(argument, leaves) for argument in arguments],
        return_unknown_args=True,
        use_underscores=True,
        description="Every key of a recipe is a flag; a switch is turned off with no_, as in --compile.no_enable.",
    )
    problems.extend(_strangers(strangers, leaves))
    values = {leaf.path: getattr(getattr(given, leaf.path[0]), _slot(leaf)) for leaf in leaves.values()}
    return _nest({path: value for path, value in values.items() if not isinstance(value, _NotGiven)})


# Which flags there are ------------------------------------------------------------------------------


def _leaves(annotation: Any, value: Any, path: Path, comment: str) -> Iterator[Leaf]:
    """Every key below `annotation` that one flag can state; labels are those that the recipe has."""
    inner = _without_none(annotation)
    origin, args = get_origin(inner), get_args(inner)
    if origin is Annotated and args[0] is Component:
        yield from _component_leaves(args[1], value if isinstance(value, Mapping) else {}, path)
    elif origin is dict:
        tables = {k: v for k, v in value.items() if isinstance(v, Mapping)} if isinstance(value, Mapping) else {}
        for label, table in tables.items():
            yield from _leaves(args[1], table, (*path, label), "")
    elif dataclasses.is_dataclass(inner):
        yield from _field_leaves(inner, value if isinstance(value, Mapping) else {}, path)
    elif not (origin is tuple and _is_table(args[0])):
        yield Leaf(path, inner, inner is not annotation, value, comment)


def _component_leaves(kind: str, table: Mapping[str, Any], path: Path) -> Iterator[Leaf]:
    name = table.get("name")
    yield Leaf((*path, "name"), str, False, name, f"which {kind}")
    if name in registry.names(kind):
        yield from _field_leaves(registry.lookup(kind, name).cls.Config, table, path)


def _field_leaves(cls: type, table: Mapping[str, Any], path: Path) -> Iterator[Leaf]:
    hints, comments = typing.get_type_hints(cls, include_extras=True), registry.field_comments(cls)
    for field in dataclasses.fields(cls):
        value = table.get(field.name, registry.default(field))
        yield from _leaves(hints[field.name], value, (*path, field.name), comments.get(field.name, ""))


def _without_none(annotation: Any) -> Any:
    union = get_origin(annotation) in (Union, types.UnionType)
    return registry.without_none(get_args(annotation)) if union else annotation


def _is_table(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated or dataclasses.is_dataclass(annotation)


# How tyro reads them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NotGiven:
    """Stands for a flag that was not given; `value` is what the recipe says, for `--help`."""

    value: Any


def _flag_type(leaves: Iterable[Leaf]) -> type:
    """A dataclass for tyro: a field a section, in it a field a flag."""
    sections: dict[str, list] = {}
    for leaf in leaves:
        flag = (_slot(leaf), _flag(leaf), dataclasses.field(default=_NotGiven(leaf.value)))
        sections.setdefault(leaf.path[0], []).append(flag)
    made = {name: dataclasses.make_dataclass(name, flags, kw_only=True) for name, flags in sections.items()}
    return dataclasses.make_dataclass("Recipe", [(n, c, dataclasses.field(default_factory=c)) for n, c in made.items()])


def _slot(leaf: Leaf) -> str:
    """A field name for a flag: labels in a recipe need not be Python names."""
    return "flag_" + leaf.key.encode().hex()


def _flag(leaf: Leaf) -> Any:
    """tyro only counts words: `_value` gives them a type, and the recipe's own parser judges it."""
    reader = tyro.constructors.PrimitiveConstructorSpec(
        nargs={bool: (0, 1), tuple: "*"}.get(get_origin(leaf.annotation) or leaf.annotation, 1),
        metavar=registry.type_name(leaf.annotation),
        instance_from_str=lambda words: None if leaf.optional and words == ["none"] else _value(leaf.annotation, words),
        is_instance=lambda value: True,
        str_from_instance=lambda default: _words(default.value),
    )
    return Annotated[Any, reader, tyro.conf.arg(name=".".join(leaf.path[1:]), help=leaf.comment.replace("%", "%%"))]


def _value(annotation: Any, words: Sequence[str]) -> Any:
    """The value that TOML would give for these words, or the words themselves where they do not fit the type."""
    if get_origin(annotation) is tuple:
        return [_scalar(get_args(annotation)[0], word) for word in words]
    if annotation is bool and not words:
        return True
    return _scalar(annotation, words[0])


def _scalar(annotation: Any, word: str) -> Any:
    if get_origin(annotation) is Literal:
        return next((c for c in get_args(annotation) if str(c) == word), word)
    if annotation is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    if annotation not in (int, float):
        return word
    try:
        return annotation(word)
    except ValueError:
        return word


def _words(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [word for item in value for word in _words(item)]
    return [str(value).lower() if value is None or isinstance(value, bool) else str(value)]


def _positive(argument: str, leaves: Mapping[str, Leaf]) -> str:
    """`--compile.no_enable` as `--compile.enable=false`, where that is a bool."""
    section, _, name = argument.removeprefix("--").rpartition(".")
    leaf = leaves.get(f"{section}.{name.removeprefix('no_')}")
    off = argument.startswith("--") and name.startswith("no_") and leaf is not None and leaf.annotation is bool
    return f"--{leaf.key}=false" if off else argument


def _strangers(words: Sequence[str], leaves: Mapping[str, Leaf]) -> list[Problem]:
    """A problem for each flag that does not exist; words without any flag before them are one too."""
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    if words and not flags:
        return [
            Problem((), f"{' '.join(words)!r} belongs to no flag; flags look like --training.steps 10", COMMAND_LINE)
        ]
    return [
        Problem((), f'no flag named "{flag}".{_meant(flag, leaves)} --help lists them all', COMMAND_LINE)
        for flag in flags
    ]


def _meant(flag: str, leaves: Iterable[str]) -> str:
    """The flags of that last word, in whatever section (`--lr`); where there are none, the one that looks like it."""
    known = [f"--{key}" for key in leaves]
    same = [other for other in known if _last_word(other) == _last_word(flag)]
    return f" Did you mean {' or '.join(same)}?" if same else registry.near_miss(flag, known)


def _last_word(flag: str) -> str:
    return flag.removeprefix("--").rpartition(".")[2]


def _nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Tables in tables from values by path."""
    table: dict[str, Any] = {}
    for path, value in values.items():
        inner = table
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return table
