"""The families as files: every variant loads at every scale, is short, and A has the sizes that the design states."""

import tomllib
import typing
from functools import cache
from typing import Any

import pytest
import torch

import registry
from recipes.ablate.family import FAMILIES, REFERENCE, read_family
from recipes.ablate.measure import COLUMNS
from recipes.ablate.runs import plan
from recipes.job import Job, differences, load, to_table
from recipes.job.files import lay, read_layers
from recipes.job.sections import JobSection
from registry import RecipeError
from tests.ranks import REPOSITORY

NAMES = sorted(f.parent.name for f in (REPOSITORY / FAMILIES).glob("*/family.toml"))
VARIANTS = [(family, variant) for family in NAMES for variant in read_family(family).variants]
SCALES = {"full": (), "proxy": ("proxy",), "debug": ("debug",)}


def of_hymo(family: str) -> bool:
    return "hymo_primary" in read_family(family).reference


def arguments(family: str, variant: str, *overlays: str) -> tuple[str, list[str]]:
    """The recipe file and the overlays that the command lays over its root."""
    found = read_family(family)
    files = [*map(found.path, found.overlays), *(f"train_configs/scales/{name}.toml" for name in overlays)]
    return found.recipe(variant), files


def recipe(family: str, variant: str) -> Job:
    """A variant of a family at full size, with every check that needs no data."""
    file, overlays = arguments(family, variant)
    flags = [word for overlay in overlays for word in ("--job.overlay", overlay)]
    return load(["--job.config_file", file, *flags], needs_data=False)


@cache
def parsed(family: str, variant: str, *overlays: str) -> dict[str, Any]:
    """The resolved sections at some scale; the checks between sections, which are slow, are left out."""
    table = lay(read_layers(*arguments(family, variant, *overlays))).table
    hints, problems = typing.get_type_hints(Job, include_extras=True), []
    sections = {
        name: registry.parse(hints[name], table.get(name, {}), (name,), problems) for name in hints if name != "job"
    }
    assert not problems
    return to_table(Job(job=JobSection(dump_folder=""), **sections))


def parameters(job: Job) -> tuple[int, int]:
    """Stored and active."""
    stored, active = (sum(column) for column in zip(*job.model.config.parameter_table().values(), strict=True))
    return stored, active


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_a_variant_is_its_parent_and_a_change_and_loads_at_every_scale(family, variant):
    file = REPOSITORY / read_family(family).recipe(variant)
    stated = tomllib.loads(file.read_text())
    assert "base" in stated and "job" not in stated and len(file.read_text().splitlines()) <= 26
    recipe(family, variant)
    for overlays in SCALES.values() if of_hymo(family) else [()]:
        assert differences(parsed(family, REFERENCE, *overlays), parsed(family, variant, *overlays))


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
    job = recipe("a_experts", variant)
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in job.model.build().parameters())
    found = parameters(job)
    assert found[0] == built
    digits = 0 if stored == 3656 else 1
    assert (round(found[0] / 1e6, digits), round(found[1] / 1e6, digits)) == (stored, active)


@pytest.mark.parametrize("overlays", SCALES.values(), ids=SCALES)
def test_a_matched_variant_is_as_large_as_its_reference_at_every_scale(overlays, tmp_path):
    family = read_family("a_experts")
    flags = [w for name in overlays for w in ("--job.overlay", f"train_configs/scales/{name}.toml")]
    runs, notes = plan(family, flags, seeds=1, ranks=1, folder=tmp_path)
    by_name = {run.variant: load(run.flags, needs_data=False) for run in runs}
    active = [parameters(by_name[name])[1] for name in (REFERENCE, "everywhere_matched")]
    assert active[1] == pytest.approx(active[0], rel=0.03 if overlays == ("debug",) else 0.005)
    if not overlays:
        assert by_name["everywhere_matched"].model.config.ffns["experts"].config.hidden == 576
    assert "model.ffns.experts.hidden = " in notes["everywhere_matched"][0]


@pytest.mark.parametrize(("overlay", "layers"), [(None, 32), ("proxy", 16), ("debug", 8)])
def test_layers_without_rotation_stand_before_each_later_attention_layer(overlay, layers, tmp_path):
    flags = ["--job.overlay", f"train_configs/scales/{overlay}.toml"] if overlay else []
    runs, _ = plan(read_family("g_positions"), flags, seeds=1, ranks=1, folder=tmp_path)
    job = load(next(run.flags for run in runs if run.variant == "partial_nope"), needs_data=False)
    reference = load(next(run.flags for run in runs if run.variant == REFERENCE), needs_data=False)
    steps = job.model.config.steps()
    assert [s.layer for s in steps if s.block == "gdn_nope"] == list(range(3, layers - 1, 4)) and len(steps) == layers
    assert parameters(job) == pytest.approx(parameters(reference), rel=1e-3 if overlay == "debug" else 0)


def test_a_shorter_variant_has_its_share_of_the_tokens_at_any_length(tmp_path):
    runs, _ = plan(read_family("f_data"), ["--training.steps", "1000"], seeds=1, ranks=1, folder=tmp_path)
    assert {run.variant: run.steps for run in runs}["fewer_tokens"] == 435


def test_a_family_that_does_not_exist_is_told_with_those_that_do():
    with pytest.raises(RecipeError, match=r'no family named "b_optimiser"\. Did you mean "b_optimizers"\?'):
        read_family("b_optimiser")
