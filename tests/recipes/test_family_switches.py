"""Chimera and Universal Swarm: every switch of their ablations is a key, and they run on the bundled text."""

import shlex
import tomllib

import pytest
import torch

from recipes.job import load
from tests.ranks import REPOSITORY

CHIMERA = {
    "the embedding's rate": "--optimizer.embedding.lr 8e-5",
    "no retina": "--model.order top",
    "no layer IDs": "--model.wires.layer_id.name none",
    "no x0 injection": "--model.wires.x0.name none",
    "no skips": "--model.wires.skips.name none",
    "no embedding norm": "--model.embedding_norm.name none",
    "no residual factors": "--model.residual 0",
    "layer IDs into the residual stream": "--model.wires.layer_id.into residual",
    "values as wide as keys": "--model.mixers.gdn.expand_v 1",
    "one loop at equal parameters": "--model.zones.top.loops 1",
    "one loop at equal depth": "--model.zones.top.loops 1 --model.zones.top.repeat 3",
    "heads of 128": "--model.mixers.attention.heads 12 --model.mixers.attention.kv_heads 3 "
    "--model.mixers.attention.head_dim 128 --model.mixers.gdn.heads 12 --model.mixers.gdn.key_dim 128",
    "half the head rotates": "--model.mixers.attention.rotary_fraction 0.5",
    "skips start at 0": "--model.wires.skips.initial 0",
}
SWARM = {
    "experts by layer": "--model.zones.swarm.share",
    "an auxiliary loss": "--model.ffns.experts.balance loss",
    "the bias acts on the choice only": "--model.ffns.experts.bias_in selection",
    "no optic nerve": "--model.order swarm resolution",
    "no resolution loop": "--model.zones.resolution.loops 1 --model.wires.layer_id.name none",
    "no resolution zone": "--model.order optic swarm --model.wires.layer_id.name none",
    "8 experts": "--model.ffns.experts.experts 8",
    "16 experts": "--model.ffns.experts.experts 16",
    "experts trained by AdamW": "--model.ffns.experts.expert_role expert "
    "--optimizer.expert.name adamw --optimizer.expert.lr 4e-4",
}
SWITCHES = [("chimera_510m", *x) for x in CHIMERA.items()] + [("swarm_blackwell_v2", *x) for x in SWARM.items()]


@pytest.mark.parametrize(("recipe", "switch", "flags"), SWITCHES, ids=[switch for _, switch, _ in SWITCHES])
def test_a_switch_is_a_key(recipe, switch, flags):
    path = REPOSITORY / "train_configs" / f"{recipe}.toml"
    job = load(["--job.config_file", str(path), *shlex.split(flags)], needs_data=False)
    with torch.device("meta"):
        built = sum(p.numel() for p in job.model.build().parameters())
    assert built == sum(stored for stored, _ in job.model.config.parameter_table().values())


def test_experts_of_the_matrix_role_are_orthogonalised_one_by_one():
    job = load(["--job.config_file", str(REPOSITORY / "train_configs/swarm_debug.toml")], needs_data=False)
    with torch.device("meta"):
        model = job.model.build()
    roles = model.shared["swarm_experts"].experts.roles()
    shapes = {logical.shape((8, 64, 160)) for logical in roles["w13_EDF"].logical}
    assert roles["w13_EDF"].name == "matrix" and job.optimizer.matrix.name == "muon"
    assert shapes == {(64, 80)} and len(roles["w13_EDF"].logical) == 16


@pytest.mark.parametrize(
    "recipe", ["chimera_510m", "chimera_1_1b", "swarm_blackwell_v2", "swarm_spark", "uffn_640_ghost"]
)
def test_a_recipe_of_full_size_runs_on_the_bundled_text_without_a_file_from_elsewhere(recipe):
    path, overlay = (str(REPOSITORY / "train_configs" / n) for n in (f"{recipe}.toml", "scales/bundled_data.toml"))
    job = load(["--job.config_file", path, "--job.overlay", overlay], needs_data=True)
    assert job.tokenizer.name == "hymo_bpe_64k" and set(job.data.sources) == {"sotu", "shakespeare"}


@pytest.mark.parametrize(("table", "recipe"), [("chimera", "chimera_510m"), ("swarm", "swarm_blackwell_v2")])
def test_a_recipe_reads_what_its_data_table_prepares(table, recipe):
    prepared = tomllib.loads((REPOSITORY / f"train_configs/data/{table}.toml").read_text())
    job = load(["--job.config_file", str(REPOSITORY / f"train_configs/{recipe}.toml")], needs_data=False)
    folder, sources = prepared["output"]["folder"], prepared["sources"]
    expected = {label: (f"{folder}/{label}", source["weight"]) for label, source in sources.items()}
    assert {label: (source.path, source.weight) for label, source in job.data.sources.items()} == expected
    assert job.tokenizer.config.path == prepared["tokenizer"]["path"]
