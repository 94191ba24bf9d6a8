"""A few optimizer steps of the tiny language model on however many ranks there are, and what came of them."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import registry
from components.losses.targets import target_counts
from components.optimizers.roles import build_optimizers
from components.parallel.apply import prepare_model
from tests.models.tiny import batch, config

GLOBAL_BATCH, STEPS, LENGTH = 4, 3, 16
ADAMW = {"name": "adamw", "lr": 3e-3}
OPTIMIZERS = {
    # A sum taken in another order may flip a sign that cautious decay looks at: little decay keeps that below 1e-5.
    "matrix": {"name": "normuon", "lr": 0.02, "weight_decay": 0.01, "ns_dtype": "float32"},
    "expert": ADAMW,
    "embedding": ADAMW,
    "router": ADAMW,
    "scalar": ADAMW,
}
PLAN = {
    "parallelism": {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": 1, "reduce_dtype": "float32"},
    "activation_checkpoint": {"mode": "none", "selective_ac_option": "op"},
    "compile": {"enable": False, "components": (), "on_failure": "error"},
}


def prepared(plan: dict | None = None, dtype: torch.dtype = torch.float32, **changes):
    """The tiny model (top-level keys of its table replaced), sharded under `plan`'s changes to PLAN."""
    sections = {name: {**values, **(plan or {}).get(name, {})} for name, values in PLAN.items()}
    sections["parallelism"].setdefault("reshard_after_forward", True)
    return prepare_model(
        config(**changes),
        dtype=dtype,
        seed=0,
        device=torch.device("cpu"),
        world=dist.get_world_size(),
        **{name: SimpleNamespace(**values) for name, values in sections.items()},
    )


def trained(plan: dict | None = None, matrix: dict | None = None, **changes) -> dict[str, torch.Tensor]:
    """Losses, gradient norms and expert counts of every step, then the whole weights, by name; on every rank."""
    model = prepared(plan, **changes)
    tables = OPTIMIZERS | ({"matrix": OPTIMIZERS["matrix"] | matrix} if matrix else {})
    components = {role: registry.parse_component("optimizer", table) for role, table in tables.items()}
    optimizer = build_optimizers(model, components)
    found = {}
    for step in range(STEPS):
        for name, value in one_step(model, optimizer, step).items():
            found[f"step {step}: {name}"] = value
    return found | {name: whole(p) for name, p in model.named_parameters()} | dict(model.named_buffers())


def one_step(model, optimizer, step: int) -> dict[str, torch.Tensor]:
    """What `recipes.pretrain.train_step` does, on made tokens: micro-batch j belongs to rank j mod ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = torch.randint(
        0, model.config.vocab_size, (GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    batches = [batch(rows[j : j + 1]) for j in range(rank, GLOBAL_BATCH, ranks)]
    counts = sum(target_counts(b, model.config.heads()) for b in batches).float()
    dist.all_reduce(counts)
    sums, aux = torch.zeros_like(counts), {}
    for b in batches:
        output = model(b)
        (output.loss_sums * (ranks / counts)).sum().backward()
        sums += output.loss_sums.detach()
        aux = {name: aux.get(name, 0) + value for name, value in output.aux.items()}
    for value in (sums, *aux.values()):
        dist.all_reduce(value)
    norm = optimizer.clip(1.0)
    optimizer.step(1.0)
    optimizer.zero_grad()
    model.update_balance(aux)
    return {"losses": sums / counts, "norm": norm, **aux}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
