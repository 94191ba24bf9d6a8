"""A few optimizer steps of the tiny language model on however many ranks there are, and what came of them."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import registry
from components.losses.targets import target_counts
from components.optimizers.roles import JointOptimizer, build_optimizers
from components.parallel import cuda_graph, micro_batch
from components.parallel.apply import Prepared, prepare_model
from components.parameters import logical_path, owned_parameters
from tests.models.tiny import batch, config
from tests.parallel import replay

GLOBAL_BATCH, STEPS, LENGTH = 4, 2, 16
ADAMW = {"name": "adamw", "lr": 3e-3}
OPTIMIZERS = {
    # Plain decay: a sum taken in another order may flip a sign that cautious decay looks at.
    "matrix": {"name": "normuon", "lr": 0.02, "weight_decay": 0.01, "cautious": False, "ns_dtype": "float32"},
    "expert": ADAMW,
    "embedding": ADAMW,
    "router": ADAMW,
    "scalar": ADAMW,
}
PLAN = {
    "parallelism": {
        "plan": "fsdp2",
        "expert_wrapping": "folded",
        "data_parallel_shard_degree": -1,
        "data_parallel_replicate_degree": 1,
        "reduce_dtype": "float32",
        "reshard_after_forward": True,
    },
    "fused_gdn": {"enable": True, "on_failure": "error"},
    "moe_mixed_precision": {"enable": True, "on_failure": "error"},
    "activation_checkpoint": {"mode": "none", "selective_ac_option": "op", "components": ("model",)},
    "compile": {"enable": False, "components": ("model", "loss"), "backend": "aot_eager", "on_failure": "error"},
    "cuda_graph": {"enable": False, "components": ("mla",), "on_failure": "error"},
}


def prepared(
    plan: dict | None = None, dtype: torch.dtype = torch.float32, packing: str = "window", **changes
) -> Prepared:
    """The tiny model (top-level keys of its table replaced), sharded under `plan`'s changes to PLAN. Without a GPU,
    recordings are imitated."""
    sections = {name: {**values, **(plan or {}).get(name, {})} for name, values in PLAN.items()}
    with nullcontext() if torch.cuda.is_available() else imitated_recordings():
        return prepare_model(
            config(**changes),
            micro_batch=(1, LENGTH),
            packing=packing,
            dtype=dtype,
            seed=0,
            device=_device(),
            world=dist.get_world_size(),
            **{name: SimpleNamespace(**values) for name, values in sections.items()},
        )


@contextmanager
def imitated_recordings():
    whole = patch.object(micro_batch, "capture", replay.capture_micro_batch)
    with patch.object(cuda_graph, "capture", replay.capture), whole:
        yield


def trained(
    plan: dict | None = None,
    dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype = torch.float32,
    **changes,
) -> dict[str, torch.Tensor]:
    """Losses, gradient norms and expert counts of every step, then all weights by logical name and the buffers; on
    every rank. `plan` may change the matrix optimizer too."""
    parts = prepared(plan, dtype, **changes)
    model, optimizer = parts.model, joint_optimizer(parts.model, (plan or {}).get("matrix", {}), master_dtype)
    optimizer.round_weights()
    parts.plan.refresh_weights()
    found = {}
    for step in range(STEPS):
        for name, value in one_step(parts, optimizer, step).items():
            found[f"step {step}: {name}"] = value
    return found | weights(model) | {logical_path(name): buffer for name, buffer in model.named_buffers()}


def joint_optimizer(model, matrix: dict, master_dtype: torch.dtype = torch.float32) -> JointOptimizer:
    tables = OPTIMIZERS | {"matrix": OPTIMIZERS["matrix"] | matrix}
    components = {role: registry.parse_component("optimizer", table) for role, table in tables.items()}
    return build_optimizers(model, components, master_dtype)


def one_step(parts: Prepared, optimizer, step: int) -> dict[str, torch.Tensor]:
    """What `recipes.pretrain.train_step` does, on made tokens."""
    losses, aux = accumulate(parts, step)
    norm = optimizer.clip(1.0)
    optimizer.step(1.0)
    parts.plan.refresh_weights()
    optimizer.zero_grad()
    parts.model.update_balance(aux)
    return {"losses": losses, "norm": norm, **aux}


def accumulate(parts: Prepared, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients of a global batch into `.grad`; losses and counts over all ranks. Micro-batch j belongs to rank j mod
    ranks."""
    rank, ranks, model = dist.get_rank(), dist.get_world_size(), parts.model
    rows = torch.randint(
        0, model.config.vocab_size, (GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    batches = [batch(rows[j : j + 1]).to(_device()) for j in range(rank, GLOBAL_BATCH, ranks)]
    counts = sum(target_counts(b, model.config.heads()) for b in batches).float()
    dist.all_reduce(counts)
    sums, aux = torch.zeros_like(counts), {}
    parts.plan.clear_gradients()
    for b in batches:
        output = parts.micro_batch(b, ranks / counts)
        sums += output.loss_sums
        aux = {name: aux.get(name, 0) + value for name, value in output.aux.items()}
    parts.plan.reduce_gradients()
    for value in (sums, *aux.values()):
        dist.all_reduce(value)
    return sums / counts, aux


def _device() -> torch.device:
    """Several ranks compute on the CPU: they see no GPU (`tests.ranks`)."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def weights(model) -> dict[str, torch.Tensor]:
    """Every logical tensor of the model, whole."""
    found = {}
    for owned in owned_parameters(model):
        stored = whole(owned.parameter)
        for logical in owned.role.logical:
            index = tuple(axis if isinstance(axis, int) else slice(*axis) for axis in logical.index)
            found[owned.logical_name(logical)] = stored[index]
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
