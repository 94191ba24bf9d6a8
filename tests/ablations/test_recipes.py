"""The families as files: every variant loads at every scale, is short, and A has the sizes that the design states."""

import dataclasses
import tomllib
import typing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import registry
from recipes.ablate.family import FAMILIES, REFERENCE, read_family
from recipes.ablate.measure import COLUMNS
from recipes.ablate.runs import plan
from recipes.job import Job, differences, to_table
from recipes.job.checks import run_checks
from recipes.job.files import lay, read_layers
from registry import RecipeError
from tests.ranks import REPOSITORY

NAMES = sorted(f.parent.name for f in (REPOSITORY / FAMILIES).glob("*/family.toml"))
VARIANTS = [(family, variant) for family in NAMES for variant in read_family(family).variants]
SCALES = {"full": (), "proxy": ("proxy",), "debug": ("debug",)}
PREFIXES = {"hymo_primary": "", "chimera_510m": "chimera_", "swarm_blackwell_v2": "swarm_"}


def scales(family: str) -> list[tuple[str, ...]]:
    """The overlays of each size that the family's recipes have: the debug family has one."""
    root = Path(read_family(family).reference).stem
    return [
        tuple(PREFIXES[root] + o for o in overlays) for overlays in SCALES.values() if root in PREFIXES or not overlays
    ]


def sections(family: str, variant: str, *overlays: str) -> dict[str, Any]:
    """What `load` makes of a variant and the overlays that the command lays, without the flags, which take long."""
    found = read_family(family)
    files = [*map(found.path, found.overlays), *(f"train_configs/scales/{name}.toml" for name in overlays)]
    table = lay(read_layers(found.recipe(variant), files)).table | {"job": {"dump_folder": "nowhere"}}
    hints, problems = typing.get_type_hints(Job, include_extras=True), []
    parsed = {name: registry.parse(hints[name], table.get(name, {}), (name,), problems) for name in hints}
    assert not problems
    return parsed


@cache
def reference(family: str, *overlays: str) -> dict[str, Any]:
    return to_table(Job(**sections(family, REFERENCE, *overlays)))


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_a_variant_is_its_parent_and_a_change_and_loads_at_every_scale(family, variant):
    file = REPOSITORY / read_family(family).recipe(variant)
    stated = tomllib.loads(file.read_text())
    assert "base" in stated and "job" not in stated and len(file.read_text().splitlines()) <= 26
    for overlays in scales(family):
        mine = sections(family, variant, *overlays)
        wrong = run_checks(mine, needs_data=False, ranks=1)
        assert not wrong or (family == "f_data" and overlays == ("debug",)), (
            wrong
        )  # the debug scale brings its own text
        assert built(mine["model"]) == parameters(mine["model"].config)[0]
        assert differences(reference(family, *overlays), to_table(Job(**mine))), "the variant changes nothing"


@pytest.mark.parametrize("family", ["a_experts", "j_chimera", "j_swarm"])
def test_a_proxy_has_50_to_70_million_active_parameters(family):
    full, proxy, debug = (parameters(sections(family, REFERENCE, *o)["model"].config) for o in scales(family))
    assert full[1] > 200e6 and 50e6 < proxy[1] < 70e6 and debug[1] < 1e6


@pytest.mark.parametrize("family", NAMES)
def test_what_is_for_a_cpu_neither_compiles_nor_records(family):
    """Also where the recipe at full size does both."""
    found = sections(family, REFERENCE, *scales(family)[-1])
    assert not found["compile"].enable and not found["cuda_graph"].enable and found["training"].dtype == "float32"


@pytest.mark.parametrize("family", NAMES)
def test_a_family_states_its_claim_and_asks_for_columns_that_exist(family):
    found = read_family(family)
    assert found.claim and found.refuted_by and set(found.columns) <= set(COLUMNS)
    files = {f.stem for f in (REPOSITORY / found.folder).glob("*.toml")} - {"family"}
    assert files == set(found.variants)


@pytest.mark.parametrize(
    ("variant", "stored", "active"), [("everywhere", 3656, 882), ("everywhere_matched", 1129.6, 436.0)]
)
def test_experts_everywhere_have_the_sizes_of_the_design(variant, stored, active):
    model = sections("a_experts", variant)["model"]
    found = parameters(model.config)
    assert found[0] == built(model)
    digits = 0 if stored == 3656 else 1
    assert (round(found[0] / 1e6, digits), round(found[1] / 1e6, digits)) == (stored, active)


def planned(family: str, variant: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The resolved recipes of the reference and of one variant, and what is said of the variant."""
    found = read_family(family)
    only = dataclasses.replace(found, variants={variant: found.variants[variant]})
    object.__setattr__(only, "folder", found.folder)
    runs, notes = plan(only, flags, seeds=1, ranks=1, folder=Path("nowhere"))
    base, mine = (run.recipe for run in runs)
    return base, mine, notes[variant]


def at(scale: str) -> list[str]:
    return [word for name in SCALES[scale] for word in ("--job.overlay", f"train_configs/scales/{name}.toml")]


def model(recipe: dict[str, Any]) -> Any:
    return registry.parse_component("model", recipe["model"]).config


def built(component: Any) -> int:
    """Parameters of the module itself."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in component.build().parameters())


def parameters(config: Any) -> tuple[int, int]:
    """Stored and active."""
    stored, active = (sum(column) for column in zip(*config.parameter_table().values(), strict=True))
    return stored, active


@pytest.mark.parametrize("scale", SCALES)
def test_a_matched_variant_is_as_large_as_its_reference_at_every_scale(scale):
    base, mine, notes = planned("a_experts", "everywhere_matched", *at(scale))
    (_, wanted), (_, active) = (parameters(model(r)) for r in (base, mine))
    assert active == pytest.approx(wanted, rel=0.03 if scale == "debug" else 0.005)
    assert scale != "full" or mine["model"]["ffns"]["experts"]["hidden"] == 576
    assert "model.ffns.experts.hidden = " in notes[0]


@pytest.mark.parametrize(("scale", "layers"), [("full", 32), ("proxy", 16), ("debug", 8)])
def test_layers_without_rotation_stand_before_each_later_attention_layer(scale, layers):
    base, mine, _ = planned("g_positions", "partial_nope", *at(scale))
    steps = model(mine).steps()
    assert [s.layer for s in steps if s.block == "gdn_nope"] == list(range(3, layers - 1, 4)) and len(steps) == layers
    found, wanted = (parameters(model(r)) for r in (mine, base))
    assert found == pytest.approx(wanted, rel=1e-3 if scale == "debug" else 0)


def test_a_shorter_variant_has_its_share_of_the_tokens_at_any_length():
    _, mine, _ = planned("f_data", "fewer_tokens", "--training.steps", "1000")
    assert mine["training"]["steps"] == 435


def test_a_family_that_does_not_exist_is_told_with_those_that_do():
    with pytest.raises(RecipeError, match=r'no family named "b_optimiser"\. Did you mean "b_optimizers"\?'):
        read_family("b_optimiser")
