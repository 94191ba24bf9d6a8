"""What must be the same on any number of ranks. One rank writes what it found, more ranks compare with it."""

from pathlib import Path

import torch
import torch.distributed as dist

from components.parallel.fsdp2 import data_mesh
from tests.models.tiny import batch, tokens
from tests.parallel.training import prepared, trained, whole

EXPERTS = {"name": "deepseek_moe", "top_k": 2, "hidden": 16}
TOLERANCE = 1e-5  # relative, for sums taken in another order


def compare(folder: Path, name: str, found: dict[str, torch.Tensor], rtol: float = TOLERANCE) -> None:
    """On one rank keep `found`; on more ranks compare with what one rank kept, tensor by tensor in relative L2."""
    path = folder / f"{name}.pt"
    if dist.get_world_size() == 1:
        torch.save(found, path)
        return
    expected = torch.load(path)
    assert set(expected) == set(found)
    for key, value in expected.items():
        error = (found[key].double() - value.double()).norm() / value.double().norm().clamp(min=1e-12)
        assert error <= rtol, f"{key}: relative error {error:.2e}"


def test_initial_weights_are_bitwise_those_of_one_rank(folder: Path):
    compare(folder, "initial", {name: whole(p) for name, p in prepared().named_parameters()}, rtol=0)


def test_losses_counts_and_weights_are_those_of_one_rank(folder: Path):
    compare(folder, "plain", trained())


def test_full_and_selective_recomputation_change_nothing(folder: Path):
    for mode in ("full", "selective"):
        compare(
            folder, "plain" if dist.get_world_size() > 1 else "own", trained({"activation_checkpoint": {"mode": mode}})
        )


def test_hybrid_sharding_changes_nothing(folder: Path):
    if dist.get_world_size() > 1:
        compare(folder, "plain", trained({"parallelism": {"data_parallel_replicate_degree": 2}}))


def test_keeping_gathered_weights_after_forward_changes_nothing(folder: Path):
    if dist.get_world_size() > 1:
        compare(folder, "plain", trained({"parallelism": {"reshard_after_forward": False}}))


def test_every_newton_schulz_distribution_gives_the_same_weights(folder: Path):
    for distribution in ("unsorted", "balanced", "naive") if dist.get_world_size() > 1 else ():
        compare(folder, "plain", trained(matrix={"distribution": distribution}))


def test_a_vocabulary_that_does_not_divide_by_the_ranks(folder: Path):
    compare(folder, "vocabulary", trained(vocab_size=67))


def test_experts_that_do_not_divide_by_the_ranks_or_are_fewer(folder: Path):
    compare(folder, "six experts", trained(ffns={"experts": {**EXPERTS, "experts": 6}}))
    compare(folder, "three experts", trained(ffns={"experts": {**EXPERTS, "experts": 3}}))


def test_experts_that_no_token_chooses(folder: Path):
    found = trained(ffns={"experts": {**EXPERTS, "experts": 64, "hidden": 8}})
    counts = torch.stack([value for key, value in found.items() if key.endswith("counts")])
    assert (counts == 0).any()
    compare(folder, "idle experts", found)


def test_looped_zones_and_shared_experts(folder: Path):
    zone = {"pattern": ["mla", "gdn"], "repeat": 2, "loops": 2, "share": ["experts"]}
    compare(folder, "loops", trained(zones={"trunk": zone}))


def test_the_tied_embedding_is_one_parameter_and_every_rank_sees_the_same_bits(folder: Path):
    """Also the router and the norms, which are sharded with their block: no rank may hold other values."""
    found = trained()
    assert not [name for name in found if name.startswith("head")]
    for name in ("embedding", "norm.weight", "layers.0.ffn.router.weight", "layers.0.mixer_norm.weight"):
        everywhere = [torch.empty_like(found[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, found[name])
        assert all(torch.equal(everywhere[0], other) for other in everywhere), name


def test_decoding_through_sharded_weights_gives_the_full_forwards_logits(folder: Path):
    model = prepared().eval()
    rows = tokens(rows=1, length=8)
    with torch.no_grad():
        full = model.logits(batch(rows))[0]
        caches = model.new_caches(1, 8, torch.float32)
        model.extend(rows[:, :5], caches)
        for i in range(5, 8):
            logits = model.extend(rows[:, i : i + 1], caches)
    torch.testing.assert_close(logits, full[:, -1], rtol=1e-4, atol=1e-5)


def test_the_mesh_has_the_degrees_that_were_asked_for():
    ranks = dist.get_world_size()
    assert data_mesh("cpu", ranks, -1, 1).shape == (ranks,)
    if ranks == 4:
        assert data_mesh("cpu", ranks, -1, 2).shape == (2, 2)
