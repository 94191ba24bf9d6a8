"""What must be the same on any number of ranks and under any plan. One rank writes what it found without any choice
of a plan; everything else is compared with that."""

import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from components.checkpoint.dcp import read, write
from components.checkpoint.state import model_state, optimizer_state
from components.parallel import zero1
from components.parallel.plan import data_mesh
from tests.models.tiny import batch, tokens
from tests.parallel import replay
from tests.parallel.plans import SMALL, WHOLE, ZERO1, alone, merged, pairs
from tests.parallel.training import accumulate, joint_optimizer, one_step, prepared, trained, weights

EXPERTS = {"name": "deepseek_moe", "top_k": 2, "hidden": 16}
TOLERANCE = 1e-5  # relative, for sums taken in another order
RECORDED = {"cuda_graph": {"enable": True}}
PER_EXPERT = {"parallelism": {"expert_wrapping": "per_expert"}}


def compare(folder: Path, name: str, found: dict[str, torch.Tensor], rtol: float = TOLERANCE) -> None:
    """Keep what one rank found first; compare everything after that with it, tensor by tensor in relative L2. Counts
    of experts are compared exactly."""
    path = folder / f"{name}.pt"
    if not path.exists():
        assert dist.get_world_size() == 1
        torch.save(found, path)
    expected = torch.load(path)
    assert set(expected) == set(found)
    for key, value in expected.items():
        error = (found[key].double() - value.double()).norm() / value.double().norm().clamp(min=1e-12)
        assert error <= (0 if key.endswith("counts") else rtol), f"{key}: relative error {error:.2e}"


def test_initial_weights_are_bitwise_those_of_one_rank_however_they_are_stored(folder: Path):
    for plan in ({}, PER_EXPERT, ZERO1):
        compare(folder, "initial", weights(prepared(plan, **SMALL).model), rtol=0)


def test_losses_counts_and_weights_are_those_of_one_rank(folder: Path):
    compare(folder, "small", trained(**SMALL))


def test_every_choice_of_a_plan_alone_changes_nothing(folder: Path):
    for name, plan in alone(dist.get_world_size()).items():
        _same(folder, name, plan)


def test_every_pair_of_choices_changes_nothing(folder: Path):
    for name, plan in pairs(dist.get_world_size()).items():
        _same(folder, name, plan)


def _same(folder: Path, name: str, plan: dict) -> None:
    try:
        compare(folder, "small", trained(plan, **SMALL))
    except Exception as error:
        raise AssertionError(f"under {name}: {error}") from error


def test_bf16_compute_and_reduction_stay_near_fp32(folder: Path):
    """Also where experts, mixers and gradients are handled in different dtypes."""
    mixed = {**PER_EXPERT, **RECORDED, "moe_mixed_precision": {"enable": False}}
    for plan in ({}, mixed, WHOLE):
        plan = merged([plan, {"parallelism": {"reduce_dtype": "bfloat16"}}])
        found, expected = trained(plan, dtype=torch.bfloat16, **SMALL), torch.load(folder / "small.pt")
        for key in (key for key in found if key.endswith("losses")):
            torch.testing.assert_close(found[key], expected[key], rtol=5e-3, atol=0)


def test_weights_rounded_to_bf16_are_those_of_one_rank_but_for_a_few_a_step_of_bf16_away(folder: Path):
    """A sum taken in another order now and then falls on the other side of a boundary between two values of bf16."""
    path, names = folder / "bf16 masters.pt", list(weights(prepared(**SMALL).model))
    for plan in ({}, ZERO1, RECORDED):
        found = trained(plan, master_dtype=torch.bfloat16, **SMALL)
        if not path.exists():
            torch.save(found, path)
        expected = torch.load(path)
        one, other = (torch.cat([values[name].flatten() for name in names]) for values in (found, expected))
        assert torch.equal(one, one.bfloat16().float())
        assert (one != other).float().mean() < 0.01
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
        for key in (key for key in found if key.endswith("losses")):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=0)


def test_a_checkpoint_of_one_storage_and_rank_count_loads_into_the_other(folder: Path):
    """One rank saves experts one by one (or weights kept whole), two load them folded and sharded, save them so, and
    four load them as the one had them."""
    for name, plan in (("experts one by one", PER_EXPERT), ("weights whole", ZERO1)):
        _handed_on(folder, name, plan if dist.get_world_size() != 2 else {})


def _handed_on(folder: Path, name: str, plan: dict) -> None:
    ranks, parts = dist.get_world_size(), prepared(plan, **SMALL)
    optimizer = joint_optimizer(parts.model, {})
    if ranks == 1:
        one_step(parts, optimizer, 0)
    views = model_state(parts.model) | optimizer_state(optimizer.state_views())
    if ranks > 1:
        read(folder / f"{name} saved by {ranks // 2}", views, dist.group.WORLD)
        parts.plan.refresh_weights()
    compare(folder, f"{name} saved", weights(parts.model), rtol=0)
    if ranks < 4:
        write(folder / f"{name} saved by {ranks}", views, dist.group.WORLD)
    optimizer.steps = 1
    compare(folder, f"{name} step after loading", one_step(parts, optimizer, 1))


def test_compiled_mixers_and_loss_change_nothing(folder: Path):
    """Traced and differentiated by the compiler, on one rank; what it would generate takes minutes (`heavy_cases`)."""
    if dist.get_world_size() == 1:
        plan = {**RECORDED, "compile": {"enable": True, "components": ("gdn", "loss")}}
        traced = counters["stats"]["unique_graphs"]
        compare(folder, "small", trained(plan, **SMALL))
        assert counters["stats"]["unique_graphs"] > traced


def test_what_cannot_be_recorded_stops_the_run_or_runs_plain(folder: Path):
    if dist.get_world_size() > 1:
        return
    with patch.object(replay, "capture", side_effect=RuntimeError("there is no CUDA device")):
        with pytest.raises(ValueError, match=r"\[cuda_graph\] cannot be switched on: there is no CUDA device"):
            prepared(RECORDED, **SMALL)
        with pytest.warns(UserWarning, match="running without"):
            found = trained({"cuda_graph": {"enable": True, "on_failure": "plain"}}, **SMALL)
    compare(folder, "small", found)
    refuse = patch.object(replay, "capture_micro_batch", side_effect=RuntimeError("there is no CUDA device"))
    with refuse, pytest.raises(ValueError, match=r"\[cuda_graph\] cannot be switched on: there is no CUDA device"):
        prepared(WHOLE, **SMALL)


def test_what_a_recorded_micro_batch_gave_outlives_the_next_and_another_shape_is_refused():
    parts, scale_H = prepared(WHOLE, **SMALL), torch.ones(2)
    first = parts.micro_batch(batch(tokens(rows=1, length=16, seed=1)), scale_H)
    kept = first.loss_sums.clone(), {name: value.clone() for name, value in first.aux.items()}
    parts.micro_batch(batch(tokens(rows=1, length=16, seed=2)), scale_H)
    assert torch.equal(first.loss_sums, kept[0])
    assert all(torch.equal(first.aux[name], value) for name, value in kept[1].items())
    with pytest.raises(ValueError, match=r"recorded with tokens_BT1 of shape \(1, 17\) was given \(2, 17\)"):
        parts.micro_batch(batch(tokens(rows=2, length=16)), scale_H)


def test_a_vocabulary_that_does_not_divide_by_the_ranks(folder: Path):
    compare(folder, "vocabulary", trained(vocab_size=67, **SMALL))


def test_experts_that_do_not_divide_by_the_ranks_or_are_fewer(folder: Path):
    for experts, plan in ((6, {}), (6, ZERO1), (3, {}), (3, PER_EXPERT), (3, ZERO1)):
        ffns = {"experts": {**EXPERTS, "experts": experts}}
        compare(folder, f"{experts} experts", trained(plan, ffns=ffns, **SMALL))


def test_experts_that_no_token_chooses(folder: Path):
    for plan in ({}, PER_EXPERT) if dist.get_world_size() == 2 else ({},):
        found = trained(plan, ffns={"experts": {**EXPERTS, "experts": 64, "hidden": 8}}, **SMALL)
        counts = torch.stack([value for key, value in found.items() if key.endswith("counts")])
        assert (counts == 0).any()
        compare(folder, "idle experts", found)


def test_looped_zones_and_shared_experts(folder: Path):
    zone = {"pattern": ["mla", "gdn", "mla"], "loops": 2, "share": ["experts"]}
    for plan in ({}, {**PER_EXPERT, "activation_checkpoint": {"mode": "full"}}):
        compare(folder, "loops", trained(plan, **{**SMALL, "zones": {"trunk": zone}}))


def test_a_reduced_gradient_takes_the_place_of_this_ranks_part_of_the_sum():
    parts = prepared(ZERO1, ffns={"experts": {**EXPERTS, "experts": 3}}, **SMALL)
    accumulate(parts, 0)
    copied = set()
    for bucket in parts.plan.buckets:
        for master, _, total in bucket.members:
            part, sharded = master.grad.to_local(), master.placements[0].dim
            shares = part.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
            assert shares or sharded > 0, "copied although its part has no gaps"
            assert part.is_contiguous() and master.grad.shape == master.shape
            copied.add(not shares)
    assert copied == ({False, True} if dist.get_world_size() > 3 else {False}), "fewer experts than ranks have gaps"


def test_buckets_of_any_size_travel_alike(folder: Path):
    """Large and small ones, one after another through the same memory."""
    with patch.object(zero1, "BUCKET", 1000):
        sizes = [bucket.sums.numel() for bucket in prepared(ZERO1, **SMALL).plan.buckets]
        assert max(sizes) > 2 * min(sizes)
        compare(folder, "small", trained(ZERO1, **SMALL))


def test_what_travels_under_zero1_travels_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        parts = prepared(ZERO1, **SMALL)
        parts.plan.reduce_gradients()


def test_what_computes_in_fp32_is_reduced_in_fp32_whatever_the_rest_is():
    by_dtype = {}
    for reduced in ("float32", "bfloat16"):
        parts = prepared(merged([ZERO1, {"parallelism": {"reduce_dtype": reduced}}]), torch.bfloat16, **SMALL)
        accumulate(parts, 0)
        for master, weight, _ in (member for bucket in parts.plan.buckets for member in bucket.members):
            by_dtype.setdefault((reduced, weight.dtype), []).append(master.grad.to_local().flatten())
    joined = {key: torch.cat(gradients) for key, gradients in by_dtype.items()}
    assert torch.equal(joined["float32", torch.float32], joined["bfloat16", torch.float32])
    one, other = (joined[reduced, torch.bfloat16] for reduced in ("float32", "bfloat16"))
    assert torch.equal(one, other) == (dist.get_world_size() == 1)
    assert (one - other).norm() < 0.01 * one.norm()


def test_routers_and_decays_compute_in_fp32_and_all_else_in_bf16_under_every_plan():
    for plan in ({}, ZERO1):
        parts, seen = prepared(plan, torch.bfloat16, **SMALL), {}

        def note(module, _, name: str, into: dict) -> None:
            into[name] = {parameter.dtype for parameter in module.parameters(recurse=False)}

        for name, module in parts.model.named_modules():
            if name and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(note, name=name, into=seen))
        accumulate(parts, 0)
        exact = {name for name in seen if name.endswith(("router", "recurrence"))}
        assert exact and all(seen[name] == {torch.float32} for name in exact), plan
        assert len(seen) > 2 * len(exact) and all(seen[name] == {torch.bfloat16} for name in seen.keys() - exact), plan


def test_every_rank_sees_the_same_bits_and_the_tied_embedding_is_one_parameter():
    """Of mixers that stay whole, and of the router and the norms, which are sharded with their block: no rank may hold
    other values."""
    for weight in prepared(ZERO1, **SMALL).model.parameters():
        _same_bits_everywhere(weight.detach(), "whole weight")
    found = trained(RECORDED, **SMALL)
    assert not [name for name in found if name.startswith("head")]
    whole_mixer = [name for name in found if name.startswith("layers.0.mixer.")]
    assert len(whole_mixer) == 7
    for name in ("embedding", "norm.weight", "layers.0.ffn.router.weight", "layers.0.mixer_norm.weight", *whole_mixer):
        _same_bits_everywhere(found[name], name)


def _same_bits_everywhere(tensor: torch.Tensor, name: str) -> None:
    everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tensor.contiguous())
    assert all(torch.equal(everywhere[0], other) for other in everywhere), name


def test_decoding_through_sharded_weights_gives_the_full_forwards_logits():
    for plan in ({}, {**PER_EXPERT, **RECORDED}, WHOLE):
        model = prepared(plan, **SMALL).model.eval()
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
        assert data_mesh("cpu", ranks, 1, 4).shape == (4, 1)
