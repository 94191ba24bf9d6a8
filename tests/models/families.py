"""Tiny stacks of the other families: changes to the tiny model's table (`tests.models.tiny.config`)."""

WEIGHTLESS = {"name": "rmsnorm", "weight": False}
WIRES = {
    "layer_id": {"name": "layer_id_gate", "zone": "top", "blocks": ["gdn"]},
    "x0": {"name": "x0_injection"},
    "skips": {"name": "unet_skips"},
}
COMMON = {
    "mixers": {
        "gdn": {"name": "gated_deltanet", "heads": 2, "key_dim": 8},
        "attention": {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8},
    },
    "ffns": {"dense": {"name": "swiglu", "hidden": 32}},
    "blocks": {"gdn": {"mixer": "gdn", "ffn": "dense"}, "attention": {"mixer": "attention", "ffn": "dense"}},
    "norm": WEIGHTLESS,
    "embedding_norm": WEIGHTLESS,
    "residual": 1.05,
    "head": {"name": "tied"},
    "mtp": None,
}

CHIMERA = COMMON | {
    "order": ["bottom", "top"],
    "zones": {"bottom": {"pattern": ["gdn", "attention"]}, "top": {"pattern": ["gdn", "attention"], "loops": 2}},
    "wires": WIRES,
}

SWARM = COMMON | {
    "ffns": COMMON["ffns"]
    | {"experts": {"name": "swarm", "experts": 4, "hidden": 16, "expert_role": "matrix", "bias_in": "logits"}},
    "blocks": COMMON["blocks"]
    | {
        "swarm_gdn": {"mixer": "gdn", "ffn": "experts"},
        "swarm_attention": {"mixer": "attention", "ffn": "experts"},
    },
    "order": ["optic", "swarm", "top"],
    "zones": {
        "optic": {"pattern": ["gdn"], "repeat": 2, "share": ["dense"]},
        "swarm": {"pattern": ["swarm_attention", "swarm_gdn"], "share": ["experts"]},
        "top": {"pattern": ["gdn"], "loops": 2},
    },
    "wires": WIRES,
}

GHOST = COMMON | {
    "mixers": COMMON["mixers"]
    | {
        "attention": COMMON["mixers"]["attention"] | {"keys": "lent"},
        "ghost": COMMON["mixers"]["attention"] | {"keys": "borrowed"},
    },
    "blocks": COMMON["blocks"] | {"ghost": {"mixer": "ghost", "ffn": "dense"}},
    "order": ["trunk"],
    "zones": {"trunk": {"pattern": ["gdn", "attention", "ghost", "gdn", "ghost"]}},
    "share": ["dense"],
}

FAMILIES = {"chimera": CHIMERA, "swarm": SWARM, "ghost": GHOST}
