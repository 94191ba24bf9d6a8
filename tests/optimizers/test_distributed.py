"""Any number of ranks computes what one rank computes: one launch for each rank count, all cases inside it."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from components.optimizers import bucket
from components.optimizers.roles import build_optimizers
from tests.optimizers.recording import capture
from tests.optimizers.small_model import NORMUON, built, configs, initialised, train

DISTRIBUTIONS = ("round_robin", "unsorted", "balanced", "naive")
LAYOUTS = ("rows", "columns", "replicated", "two meshes")
CASES = [(d, "rows") for d in DISTRIBUTIONS] + [("naive", "replicated")] + [("round_robin", at) for at in LAYOUTS[1:]]
RECORDED = [("round_robin", "rows"), ("naive", "replicated"), ("round_robin", "two meshes")]
HOW = {"recorded": 2**24, "recorded, a bucket a batch": 1}  # elements of a bucket
RANKS = (1, 2, 4)
STEPS = 3


def build(distribution, layout, ns_dtype="float32"):
    """The small model, sharded, and its optimizers; NorMuon for matrices and folded experts."""
    model, ranks = initialised(), dist.get_world_size()
    hybrid = init_device_mesh("cpu", (2, ranks // 2) if ranks > 1 else (1, 1), mesh_dim_names=("replicate", "shard"))
    options = {
        "rows": {},
        "columns": {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % ranks == 0 else None},
        "replicated": {"mesh": hybrid},
        "two meshes": {},
    }[layout]
    fully_shard(model.mixer, **(options if layout != "two meshes" else {"mesh": hybrid}))
    fully_shard(model, **options)
    table = NORMUON | {"distribution": distribution, "nesterov": True, "ns_dtype": ns_dtype}
    return model, build_optimizers(model, configs(matrix=table, expert=table))


def observe(model, optimizer, rank=0, ranks=1):
    """Everything that must not depend on the ranks, after some steps; the same on every rank."""
    part = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    train(model, optimizer, range(STEPS), part)
    model(torch.arange(6)[None]).logsumexp(-1).sum().backward()
    found = {"norm": optimizer.clip(0.1)}
    optimizer.step(0.1, measure=True)
    found |= {f"rms of {role}": rms for role, rms in optimizer.update_rms().items()}
    found |= {name: full(p) for name, p in model.named_parameters()}
    found |= joined(from_all(list(optimizer.state_views())))
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def joined(views):
    """Whole state by logical name, from the parts of all ranks; NaN where no rank has a part."""
    whole = {}
    for state, view in views:
        tensor = whole.setdefault(f"{view.name} {state}", torch.full(view.shape, torch.nan))
        tensor[tuple(slice(o, o + s) for o, s in zip(view.offset, view.local.shape, strict=True))] = view.local
    return whole


def from_all(items):
    if not dist.is_initialized():
        return items
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return [item for of_rank in gathered for item in of_rank]


def work(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
    found = {(d, layout): observe(*build(d, layout), rank, ranks) for d, layout in CASES}
    found["bfloat16"] = observe(*build("balanced", "rows", "bfloat16"), rank, ranks)
    for case in RECORDED:
        for how, elements in HOW.items():
            bucket.BUCKET_ELEMENTS = elements
            model, optimizer = build(*case)
            optimizer.record(capture)
            found[how, *case] = observe(model, optimizer, rank, ranks)
    torch.save(found, f"{folder}/{ranks}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{ranks: [what each rank saw, by case]}"""
    folder = str(tmp_path_factory.mktemp("ranks"))
    for ranks in RANKS:
        mp.spawn(work, (ranks, folder), nprocs=ranks)
    return {ranks: [torch.load(f"{folder}/{ranks}-{r}.pt") for r in range(ranks)] for ranks in RANKS}


@pytest.fixture(scope="module")
def unsharded():
    """What is to be seen without a process group and without sharding."""
    table = NORMUON | {"nesterov": True}
    return observe(*built(matrix=table, expert=table))


@pytest.mark.parametrize("distribution, layout", CASES)
@pytest.mark.parametrize("ranks", RANKS)
def test_weights_state_norm_and_update_are_those_of_plain_tensors(found, unsharded, ranks, distribution, layout):
    expected = unsharded
    seen = found[ranks][0][distribution, layout]
    assert set(seen) == set(expected)
    for name, tensor in expected.items():
        assert (seen[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_bf16_newton_schulz_agrees_across_ranks_to_its_own_rounding(found, ranks):
    for name, tensor in found[1][0]["bfloat16"].items():
        assert (found[ranks][0]["bfloat16"][name] - tensor).norm() <= 1e-2 * tensor.norm(), name


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", RECORDED)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_step_is_bitwise_the_same_recorded_or_plain_and_however_matrices_travel(found, ranks, case, how):
    for of_rank in found[ranks]:
        for name, tensor in of_rank[case].items():
            if name.startswith("rms"):  # which is summed bucket by bucket
                torch.testing.assert_close(of_rank[how, *case][name], tensor, rtol=1e-6, atol=0)
            else:
                assert torch.equal(of_rank[how, *case][name], tensor), name


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_agree_bit_for_bit(found, ranks):
    for of_rank in found[ranks]:
        for case, tensors in of_rank.items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, found[ranks][0][case][name]), (case, name)
