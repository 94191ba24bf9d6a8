"""registry.py: names to typed components, and every wrong table told in one sentence."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import registry
from registry import Component, Problem, RecipeError, parse, parse_component, register

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Inner:
    sizes: tuple[int, ...] = (1, 2)  # any number of them
    pair: tuple[float, float] = (0.5, 1.0)


@pytest.fixture
def toys(monkeypatch):
    """A kind of its own for every test, so that the contract tests never meet it."""
    monkeypatch.setattr(registry, "_ENTRIES", {})

    @register("toy", "plain")
    class Plain:
        """A toy of one number."""

        @dataclass(frozen=True, kw_only=True)
        class Config:
            heads: int  # how many
            rate: float = 0.1
            mode: Literal["slow", "fast"] = "slow"
            note: str | None = None
            inner: dict[str, Inner] = field(default_factory=dict)

            def __post_init__(self):
                if self.heads % 2:
                    raise ValueError(f"heads = {self.heads} must be even")

        def __init__(self, config: Config, **facts: Any):
            self.config, self.facts = config, facts

    @register("toy", "holder")
    class Holder:
        @dataclass(frozen=True, kw_only=True)
        class Config:
            part: Annotated[Component, "toy"]
            extra: Annotated[Component, "toy"] | None = None

        def __init__(self, config: Config):
            self.config = config


def problems_of(annotation, value) -> list[str]:
    problems: list[Problem] = []
    assert parse(annotation, value, ("x",), problems) is None or not problems
    return [str(p) for p in problems]


def test_a_table_becomes_a_typed_component_that_builds_with_the_facts_of_its_caller(toys):
    component = parse_component("toy", {"name": "plain", "heads": 4, "rate": 1, "inner": {"a": {"sizes": [3]}}})
    built = component.build(dim=8)
    assert (built.config.rate, type(built.config.rate)) == (1.0, float)
    assert built.config.inner == {"a": Inner(sizes=(3,))}
    assert built.facts == {"dim": 8}


def test_all_problems_of_a_table_are_told_at_once(toys):
    table = {"name": "plain", "haeds": 4, "rate": "high", "mode": "fasst", "inner": {"a": {"pair": [1.0]}}}
    with pytest.raises(RecipeError) as error:
        parse_component("toy", table)
    told = str(error.value).splitlines()
    assert told == [
        '[toy.haeds]: no key named "haeds". Did you mean "heads"? Known: heads, inner, mode, note, rate',
        "[toy.rate]: must be float, not str 'high'",
        '[toy.mode]: no choice named "fasst". Did you mean "fast"? Known: fast, slow',
        "[toy.inner.a.pair]: needs 2 values, not 1",
        "[toy.heads]: heads is missing (int); add it",
    ]


def test_an_impossible_value_is_told_in_the_words_of_the_component(toys):
    with pytest.raises(RecipeError, match=r"^\[toy\]: heads = 3 must be even$"):
        parse_component("toy", {"name": "plain", "heads": 3})


def test_an_unknown_name_is_told_with_the_nearest_and_all_registered_ones(toys):
    table = {"name": "holder", "part": {"name": "plan", "heads": 2}}
    with pytest.raises(RecipeError) as error:
        parse_component("toy", table)
    assert str(error.value) == '[toy.part]: no toy named "plan". Did you mean "plain"? Registered: holder, plain'


def test_a_component_table_without_a_name_is_told_what_to_choose_from(toys):
    with pytest.raises(RecipeError, match=r"needs a name that selects its toy\. Registered: holder, plain"):
        parse_component("toy", {"name": "holder", "part": {"heads": 2}})


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, True),
        (int, 1.0),
        (bool, 1),
        (str, 1),
        (float, True),
        (tuple[int, ...], 3),
        (dict[str, int], 3),
        (Inner, 3),
    ],
)
def test_a_value_of_another_type_is_refused_rather_than_converted(annotation, value):
    assert len(problems_of(annotation, value)) == 1


def test_the_name_none_takes_an_optional_component_away(toys):
    table = {"name": "holder", "part": {"name": "plain", "heads": 2}, "extra": {"name": "none"}}
    assert parse_component("toy", table).config.extra is None


def test_in_a_table_of_labels_name_is_a_title_and_no_label():
    assert parse(dict[str, Inner], {"name": "mine", "a": {}}, (), []) == {"a": Inner()}


def test_a_name_registered_twice_names_both_places(toys):
    @dataclass
    class Again:
        Config = Inner

    with pytest.raises(
        ValueError, match=r"toy 'plain' is registered twice: .*test_registry.py:\d+ and .*test_registry.py:\d+"
    ):
        register("toy", "plain")(Again)


def test_a_class_without_a_config_cannot_be_registered(toys):
    with pytest.raises(TypeError, match="must hold a dataclass named Config"):
        register("toy", "bare")(type("Bare", (), {"__module__": __name__}))


def test_a_class_whose_config_lacks_what_its_kind_is_counted_by_cannot_be_registered(toys):
    class Config(Inner):
        def parameters(self, dim): ...

    for kind, said in (
        ("ffn", r"lacks active_parameters\(\), flops\(\): .* every ffn has parameters\(\), .* and flops\(\)"),
        ("head", r"lacks flops\(\): the Config of every head has flops\(\)"),
    ):
        with pytest.raises(TypeError, match=said):
            register(kind, "half")(type("Half", (), {"__module__": __name__, "Config": Config}))
    assert not registry.names("ffn") and not registry.names("head")


def test_describe_tells_type_default_and_comment_of_each_field_and_of_inherited_ones(toys):
    @register("toy", "derived")
    class Derived:
        @dataclass(frozen=True, kw_only=True)
        class Config(Inner):
            rate: float  # speed

    text = registry.describe("toy", "derived")
    assert "any number of them" in text
    assert [line.split() for line in text.splitlines() if "rate" in line] == [["rate", "float", "required", "speed"]]


def test_the_command_lists_every_kind_and_name():
    listed = subprocess.run([sys.executable, "-m", "registry"], cwd=REPOSITORY, capture_output=True, text=True)
    assert listed.returncode == 0
    for word in ("mixer", "hymo_gdn", "mla", "deepseek_moe", "normuon", "wsd", "hymo_bpe_64k"):
        assert word in listed.stdout


def test_a_reader_that_closes_the_pipe_early_sees_no_traceback():
    command = f"{sys.executable} -m registry | head -n 1"
    ended = subprocess.run(command, shell=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert len(ended.stdout.splitlines()) == 1 and ended.stderr == ""


def test_the_command_says_how_it_is_used_when_asked_and_when_misused(capsys):
    assert registry.main(["mixer", "--help"]) == 0
    assert capsys.readouterr().out == "usage: python -m registry [kind [name]]\n"
    assert registry.main(["mixer", "mla", "heads"]) == 2
    assert capsys.readouterr().err == "usage: python -m registry [kind [name]]\n"


def test_the_command_describes_the_fields_of_a_component(capsys):
    assert registry.main(["mixer", "hymo_gdn"]) == 0
    assert "rotary_fraction" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "meant"), [(["mixr"], "mixer"), (["mixer", "hymo_gnd"], "hymo_gdn")])
def test_the_command_refuses_a_misspelt_kind_or_name(capsys, arguments, meant):
    assert registry.main(arguments) == 2
    assert f'Did you mean "{meant}"?' in capsys.readouterr().err
