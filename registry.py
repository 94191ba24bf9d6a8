"""Names to typed components: the one place where a recipe's table becomes an object.

A component is a class that holds its own frozen, keyword-only `Config` dataclass:

    @register("mixer", "my_mixer", example={"heads": 2})
    class MyMixer(nn.Module):
        @dataclass(frozen=True, kw_only=True)
        class Config:
            heads: int            # one comment a field: `python -m registry mixer my_mixer` prints it
        def __init__(self, config: Config, *, dim: int, layer: int): ...

`parse` turns a table (what TOML gives) into typed values and collects every problem instead of
stopping at the first; `Component.build` makes the object, with the facts only the caller knows.
Left out on purpose: reading files, parents, overlays and flags, which is `recipes/job.py`.
Standard library only.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

Path = tuple[str, ...]

COUNTED = ("parameters", "active_parameters", "flops")
PROMISED = {  # methods that a kind's Config has: a recipe is counted before anything is built
    "mixer": (*COUNTED, "cache_numbers"), "ffn": COUNTED, "mtp": COUNTED, "head": ("flops",), "norm": ("parameters",),
    "wire": ("parameters",),
}  # fmt: skip

_ENTRIES: dict[str, dict[str, "Entry"]] = {}


@dataclass(frozen=True)
class Entry:
    """A registered class, the tiny table that builds it in the contract tests, and where it stands."""

    cls: type
    example: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class Component:
    """What a table with a `name` becomes: the kind, the registered name and the typed config."""

    kind: str
    name: str
    config: Any

    @property
    def cls(self) -> type:
        return lookup(self.kind, self.name).cls

    def build(self, **facts: Any) -> Any:
        """The component itself; `facts` are what only the caller knows (dim, layer index, ...)."""
        return self.cls(self.config, **facts)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe: the dotted path of the value, a sentence with the remedy, and where it was stated
    (a file, the command line), which only the reader of files knows."""

    path: Path
    message: str
    origin: str = ""

    def __str__(self) -> str:
        place = f"[{'.'.join(self.path)}]" if self.path else ""
        return f"{' '.join(p for p in (self.origin, place) if p)}: {self.message}"


class RecipeError(ValueError):
    """A recipe that cannot be run. `problems` holds every one that was found, in order."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


def register(kind: str, name: str, *, example: Mapping[str, Any] | None = None) -> Callable[[type], type]:
    """Class decorator: enter the class under `kind` and `name`.

    `example` is a tiny table (without `name`) from which the contract tests build the component.
    Raises ValueError, naming both places, if the name is taken, and TypeError if there is no `Config` dataclass or it
    lacks a method that its kind has.
    """

    def enter(cls: type) -> type:
        if not dataclasses.is_dataclass(getattr(cls, "Config", None)):
            raise TypeError(f"{cls.__module__}.{cls.__qualname__} must hold a dataclass named Config to be registered")
        missing = [f"{name}()" for name in PROMISED.get(kind, ()) if not callable(getattr(cls.Config, name, None))]
        if missing:
            where = f"{cls.__module__}.{cls.__qualname__}.Config"
            raise TypeError(f"{where} lacks {', '.join(missing)}: the Config of every {kind} has {_promised(kind)}")
        place = f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
        taken = _ENTRIES.setdefault(kind, {}).get(name)
        if taken is not None:
            raise ValueError(f"{kind} {name!r} is registered twice: {taken.place} and {place}; rename one of them")
        _ENTRIES[kind][name] = Entry(cls, dict(example or {}), place)
        return cls

    return enter


def _promised(kind: str) -> str:
    *first, last = (f"{name}()" for name in PROMISED[kind])
    return f"{', '.join(first)} and {last}" if first else last


def kinds() -> list[str]:
    return sorted(_ENTRIES)


def names(kind: str) -> list[str]:
    return sorted(_ENTRIES.get(kind, {}))


def lookup(kind: str, name: str) -> Entry:
    """The entry of a registered name; KeyError with a suggestion if there is none."""
    if name not in _ENTRIES.get(kind, {}):
        raise KeyError(unknown(kind, name, names(kind), "Registered"))
    return _ENTRIES[kind][name]


def discover(imports: Iterable[str] = ()) -> None:
    """Import every module of `components`, then every module named in `imports`. Import errors propagate."""
    package = importlib.import_module("components")
    for module in pkgutil.walk_packages(package.__path__, "components."):
        importlib.import_module(module.name)
    for name in imports:
        importlib.import_module(name)


def unknown(what: str, name: str, known: Iterable[str], word: str = "Known") -> str:
    """'no mixer named "x". Did you mean "y"? Known: y, z' -- the one wording for every wrong name."""
    known = sorted(known)
    return f'no {what} named "{name}".{near_miss(name, known)} {word}: {", ".join(known) or "none"}'


def near_miss(name: str, known: Iterable[str]) -> str:
    """' Did you mean "y"?' where one of `known` looks like `name`, and nothing where none does."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""


# Tables to typed values ---------------------------------------------------------------------------


def parse(annotation: Any, value: Any, path: Path, problems: list[Problem]) -> Any:
    """`value` as `annotation` says, or None with the reasons appended to `problems`.

    Annotations understood: bool, int, float, str, Literal, X | None, tuple[X, ...], tuple[X, Y], dict[str, X], Any,
    dataclasses, and Annotated[Component, kind] for a table whose `name` selects a registered component.
    In a table of labels (dict) `name` is a title, not a label; an optional component of name "none" is None.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated and args[0] is Component:
        return _parse_component(args[1], value, path, problems)
    if origin in (Union, types.UnionType):
        return None if _is_none(args, value) else parse(without_none(args), value, path, problems)
    if origin is Literal:
        return _parse_choice(args, value, path, problems)
    if origin is tuple:
        return _parse_tuple(args, value, path, problems)
    if origin is dict:
        if not isinstance(value, Mapping):
            return _wrong(annotation, value, path, problems)
        labels = {k: v for k, v in value.items() if k != "name" or isinstance(v, Mapping)}
        return {k: parse(args[1], v, (*path, k), problems) for k, v in labels.items()}
    if dataclasses.is_dataclass(annotation):
        return parse_fields(annotation, value, path, problems)
    return _parse_scalar(annotation, value, path, problems)


def parse_fields(cls: type, table: Any, path: Path, problems: list[Problem]) -> Any:
    """A dataclass from a table: unknown keys, missing keys and wrong types are problems, and so is a ValueError of
    its `__post_init__`."""
    if not isinstance(table, Mapping):
        return _wrong(cls, table, path, problems)
    before = len(problems)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values = {}
    for key, value in table.items():
        if key not in fields:
            problems.append(Problem((*path, key), unknown("key", key, fields)))
        else:
            values[key] = parse(hints[key], value, (*path, key), problems)
    for key, field in fields.items():
        if key not in table and _required(field):
            problems.append(Problem((*path, key), f"{key} is missing ({type_name(hints[key])}); add it"))
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:
        found = getattr(error, "problems", None) or [Problem((), str(error))]
        problems.extend(Problem((*path, *p.path), p.message) for p in found)
        return None


def parse_component(kind: str, table: Mapping[str, Any], path: Path = ()) -> Component:
    """A component from a table with a `name`; RecipeError holds every problem. For tests and small programs."""
    problems: list[Problem] = []
    component = _parse_component(kind, table, path or (kind,), problems)
    if problems:
        raise RecipeError(problems)
    return component


def type_name(annotation: Any) -> str:
    """An annotation as a person would write it in documentation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{args[1]} table"
    if origin is Literal:
        return " | ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in args)
    if origin in (Union, types.UnionType):
        return f"{type_name(without_none(args))}, optional"
    if origin is tuple:
        inner = args[:1] if args[-1] is Ellipsis else args
        return f"list of {', '.join(type_name(a) for a in inner)}"
    if origin is dict:
        return f"labelled {type_name(args[1])}s"
    if dataclasses.is_dataclass(annotation):
        return "table"
    return getattr(annotation, "__name__", str(annotation))


def _parse_component(kind: str, table: Any, path: Path, problems: list[Problem]) -> Component | None:
    if not isinstance(table, Mapping):
        return _wrong(Annotated[Component, kind], table, path, problems)
    name = table.get("name")
    if not isinstance(name, str):
        choices = ", ".join(names(kind)) or "none"
        problems.append(
            Problem((*path, "name"), f"this table needs a name that selects its {kind}. Registered: {choices}")
        )
        return None
    if name not in _ENTRIES.get(kind, {}):
        problems.append(Problem(path, unknown(kind, name, names(kind), "Registered")))
        return None
    rest = {k: v for k, v in table.items() if k != "name"}
    config = parse_fields(lookup(kind, name).cls.Config, rest, path, problems)
    return None if config is None else Component(kind, name, config)


def _parse_choice(choices: tuple, value: Any, path: Path, problems: list[Problem]) -> Any:
    if any(value == c and type(value) is type(c) for c in choices):
        return value
    if isinstance(value, str) and all(isinstance(c, str) for c in choices):
        problems.append(Problem(path, unknown("choice", value, choices)))
    else:
        problems.append(Problem(path, f"must be one of {type_name(Literal[choices])}, not {value!r}"))
    return None


def _parse_tuple(args: tuple, value: Any, path: Path, problems: list[Problem]) -> Any:
    if not isinstance(value, list | tuple):
        return _wrong(tuple[args], value, path, problems)
    if args[-1] is Ellipsis:
        args = args[:1] * len(value)
    if len(args) != len(value):
        problems.append(Problem(path, f"needs {len(args)} values, not {len(value)}"))
        return None
    return tuple(parse(a, v, (*path, str(i)), problems) for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _parse_scalar(annotation: Any, value: Any, path: Path, problems: list[Problem]) -> Any:
    if annotation is Any:
        return value
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:
        return _wrong(annotation, value, path, problems)
    return value


def _wrong(annotation: Any, value: Any, path: Path, problems: list[Problem]) -> None:
    found = "a table" if isinstance(value, Mapping) else f"{type(value).__name__} {value!r}"
    problems.append(Problem(path, f"must be {type_name(annotation)}, not {found}"))


def _is_none(args: tuple, value: Any) -> bool:
    """How a child takes away its parent's optional part, TOML having no null: `mtp = { name = "none" }`."""
    if not isinstance(value, Mapping):
        return value is None
    kind = next((get_args(a)[1] for a in args if get_origin(a) is Annotated), None)
    return kind is not None and value.get("name") == "none" and "none" not in names(kind)


def without_none(args: tuple) -> Any:
    """The X of `X | None`."""
    rest = [a for a in args if a is not type(None)]
    assert len(rest) == 1, f"a field may be X | None, not a wider union: {args}"
    return rest[0]


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# python -m registry [kind [name]] -----------------------------------------------------------------


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").split("\n")[0]


@functools.cache
def field_comments(cls: type) -> dict[str, str]:
    """The comment that stands behind each field of a dataclass, by field name; bases first."""
    comments = {}
    for line in "".join(inspect.getsource(c) for c in cls.__mro__[-2::-1]).splitlines():
        code, _, comment = line.partition("#")
        if ":" in code:
            comments[code.split(":")[0].strip()] = comment.strip()
    return comments


def describe(kind: str, name: str) -> str:
    """Every field of a component with type, default and comment, as text."""
    entry = lookup(kind, name)
    hints = typing.get_type_hints(entry.cls.Config, include_extras=True)
    comments = field_comments(entry.cls.Config)
    lines = [f"{kind} {name}: {_summary(entry.cls)}", f"  {entry.place}"]
    for field in dataclasses.fields(entry.cls.Config):
        stated = "required" if _required(field) else f"default {default(field)!r}"
        lines.append(f"  {field.name:22} {type_name(hints[field.name]):32} {stated:24} {comments.get(field.name, '')}")
    return "\n".join(line.rstrip() for line in lines)


def default(field: dataclasses.Field) -> Any:
    """A field's default value, or None where it has to be stated."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if _required(field) else field.default_factory()


def main(arguments: list[str]) -> int:
    asked = bool({"-h", "--help"} & set(arguments))
    if asked or len(arguments) > 2:
        print("usage: python -m registry [kind [name]]", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    discover()
    for argument, known, what in zip(
        arguments, (kinds(), names(arguments[0]) if arguments else []), ("kind", "name"), strict=False
    ):
        if argument not in known:
            print(unknown(what if what == "kind" else arguments[0], argument, known), file=sys.stderr)
            return 2
    if len(arguments) == 2:
        print(describe(*arguments))
        return 0
    for kind in arguments or kinds():
        print(kind)
        for name in names(kind):
            print(f"  {name:22} {_summary(lookup(kind, name).cls)}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python -m registry | head` ends like any other command
    # Run as a script this file would be a second module beside `registry`, with a second, empty table of names.
    sys.exit(importlib.import_module("registry").main(sys.argv[1:]))
