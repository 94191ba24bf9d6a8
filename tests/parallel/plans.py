"""Every choice that a plan offers, one at a time and in pairs."""

from itertools import combinations, product

Choice = tuple[str, str]  # what is chosen, and how
Plan = dict[str, dict]  # changes to the sections of `training.PLAN`

SMALL = {  # changes to the tiny model: enough for every choice
    "zones": {"trunk": {"pattern": ["mla", "gdn"]}},
    "mtp": {"name": "mtp", "depth": 1, "weights": [0.3], "hidden": 16},
}


RECOMPUTED = {
    "every block": {"mode": "full"},
    "all but products": {"mode": "selective"},
    "every second block": {"mode": "selective", "selective_ac_option": "2"},
    "mixers of a label": {"mode": "full", "components": ("gdn",)},
}
ANY = {  # what goes with every way of sharding
    "recomputed": {"nothing": {}} | {n: {"activation_checkpoint": table} for n, table in RECOMPUTED.items()},
    "expert products": {"mixed": {}, "exact": {"moe_mixed_precision": {"enable": False}}},
    # all four distributions: tests/optimizers/test_distributed.py
    "orthogonalised": {"round robin": {}, "balanced": {"matrix": {"distribution": "balanced"}}},
}
ZERO1 = {"parallelism": {"plan": "zero1"}}
WHOLE = {**ZERO1, "cuda_graph": {"enable": True, "components": ("model",)}}


def fsdp2(ranks: int) -> dict[str, dict[str, Plan]]:
    """By what is chosen, the changes that each choice makes; the first is the plain one."""
    copies = {f"{n} copies": {"parallelism": {"data_parallel_replicate_degree": n}} for n in (2, 4) if n <= ranks}
    return {
        "experts": {"folded": {}, "one by one": {"parallelism": {"expert_wrapping": "per_expert"}}},
        "copies": {"one copy": {}, **copies},
        "gathered weights": {"freed": {}, "kept": {"parallelism": {"reshard_after_forward": False}}},
        "mla": {"sharded": {}, "whole and recorded": {"cuda_graph": {"enable": True}}},
        **ANY,
    }


def zero1() -> dict[str, dict[str, Plan]]:
    return {"micro-batch": {"launched": ZERO1, "recorded": WHOLE}, **ANY}


def alone(ranks: int) -> dict[str, Plan]:
    """Each choice that is not the plain one, with everything else plain."""
    single = {f"{what}: {how}": plan for what, ways in fsdp2(ranks).items() for how, plan in list(ways.items())[1:]}
    return single | {"zero1": ZERO1, "zero1, recorded": WHOLE}


def pairs(ranks: int) -> dict[str, Plan]:
    """Few plans that together hold every pair of choices that go together."""
    table = fsdp2(ranks)
    table["copies"] = dict(list(table["copies"].items())[:2])  # more differ from two in number only
    return covering(table) | covering(zero1())


def covering(table: dict[str, dict[str, Plan]]) -> dict[str, Plan]:
    """Each plan takes a pair not seen yet, then for everything else the choice that completes most such pairs."""
    wanted = {
        frozenset(pair)
        for (a, ways_a), (b, ways_b) in combinations(table.items(), 2)
        for pair in product([(a, how) for how in ways_a], [(b, how) for how in ways_b])
    }
    found = {}
    while wanted:
        chosen = dict(min(wanted, key=sorted))
        for what in table.keys() - chosen.keys():
            chosen[what] = max(table[what], key=lambda how: len(wanted & _pairs({**chosen, what: how})))
        wanted -= _pairs(chosen)
        found[", ".join(f"{what}: {how}" for what, how in sorted(chosen.items()))] = merged(
            table[what][how] for what, how in chosen.items()
        )
    return found


def merged(plans) -> Plan:
    joint: Plan = {}
    for plan in plans:
        for section, changes in plan.items():
            joint[section] = joint.get(section, {}) | changes
    return joint


def _pairs(chosen: dict[str, str]) -> set[frozenset[Choice]]:
    return {frozenset(pair) for pair in combinations(chosen.items(), 2)}
