"""Loops, shared pools, borrowed keys and wires under sharding: the same on any number of ranks and under any plan."""

from pathlib import Path

import torch.distributed as dist

from tests.models.families import FAMILIES, SWARM
from tests.parallel.plans import WHOLE
from tests.parallel.rank_cases import PER_EXPERT, compare
from tests.parallel.training import trained

RECOMPUTED = {"activation_checkpoint": {"mode": "full"}}
COMPILED = {"compile": {"enable": True}}
# Errors are relative to the values, and these would start at 0.
X0 = {"x0": {"name": "x0_injection", "initial": 0.1}}


def same(folder: Path, family: str, *plans: dict) -> None:
    """Under every plan on one and two ranks, under the first on four."""
    table = FAMILIES[family]
    table = table | ({"wires": table["wires"] | X0} if "wires" in table else {})
    for plan in plans if dist.get_world_size() < 4 else plans[:1]:
        compare(folder, family, trained(plan, **table))


def test_looped_blocks_with_wires(folder: Path):
    same(folder, "chimera", {}, RECOMPUTED, WHOLE)


def test_a_pool_that_layers_share(folder: Path):
    same(folder, "swarm", {}, {**PER_EXPERT, **RECOMPUTED}, WHOLE)


def test_borrowed_keys(folder: Path):
    same(folder, "ghost", {}, RECOMPUTED, WHOLE)


def test_compiled_loops(folder: Path):
    if dist.get_world_size() == 1:
        same(folder, "chimera", COMPILED)


def test_an_auxiliary_loss_weighs_the_same_on_any_number_of_ranks(folder: Path):
    experts = SWARM["ffns"]["experts"] | {"balance": "loss", "loss_weight": 1.0}
    table = SWARM | {"ffns": SWARM["ffns"] | {"experts": experts}, "wires": SWARM["wires"] | X0}
    compare(folder, "auxiliary", trained(**table))
