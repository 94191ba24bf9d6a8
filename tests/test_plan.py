"""recipes.plan: counts against the built model, memory against known tensors, time and cost against arithmetic."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from components.kernels.gated_delta_rule.op import gated_delta_rule
from components.parameters import owned_parameters
from recipes.job import Job, load
from recipes.plan.__main__ import main
from recipes.plan.estimate import Machine, estimate
from recipes.plan.loops import cache_residency, flops_by_loop, virtual_parameters
from recipes.plan.memory import (
    LiveBytes,
    activations,
    computing_model,
    footprint,
    memory_per_rank,
    norms_of_cuda,
    zeros_batch,
)

RECIPES = Path(__file__).resolve().parents[1] / "train_configs"
H100 = Machine(ranks=1, gpu="NVIDIA H100 80GB HBM3", mfu=40.0, tps=None, price=2.0)


def job(name: str, *flags: str) -> Job:
    return load(["--job.config_file", str(RECIPES / f"{name}.toml"), *flags], needs_data=False)


def plan(capsys, *arguments: str):
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("hymo_primary", 1129.0, 435.6), ("hymo_small", 1042.0, 398.0), ("hymo_large", 1379.0, 542.0)],
)
def test_parameters_from_the_recipe_equal_the_design_and_the_built_model(name, total, active):
    recipe = job(name)
    with torch.device("meta"):
        built = sum(owned.parameter.numel() for owned in owned_parameters(recipe.model.build()))
    stored, used = (sum(column) for column in zip(*recipe.model.config.parameter_table().values(), strict=True))
    assert stored == built
    assert stored / 1e6 == pytest.approx(total, rel=0.001)
    assert used / 1e6 == pytest.approx(active, rel=0.001)


def test_the_primary_is_planned_in_seconds_and_as_the_design_says(capsys):
    start = time.process_time()
    found = plan(capsys, "--job.config_file", str(RECIPES / "hymo_primary.toml"))
    assert time.process_time() - start < 20
    flops = found["flops_per_token"]
    assert flops["total"] == pytest.approx(3.72e9, rel=0.005)
    assert flops["matmul"] + flops["head"] == pytest.approx(6 * 550.6e6, rel=0.001)
    assert (flops["attention"], flops["recurrence"]) == pytest.approx((0.403e9, 0.018e9), rel=0.02)
    assert found["steps"] == 57_220
    assert found["tokens"] == 57_220 * 524_288
    assert sum(found["parameters"]["by_role"].values()) == found["parameters"]["total"]
    assert [row["mixer"] for row in found["stack"]] == ["mla", "hymo_gdn", "hymo_gdn", "hymo_gdn"] * 8


def test_the_flop_formulas_equal_the_products_that_a_forward_pass_does():
    recipe, aten = job("hymo_primary", "--training.local_batch_size", "1"), torch.ops.aten
    grouped = {aten._grouped_mm: lambda rows, weights, *_, **__: 2 * rows[0] * weights[1] * weights[2]}
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=grouped) as counter, torch.no_grad():
        computing_model(recipe).logits(zeros_batch(1, 4096, "window"))
    counted = counter.get_flop_counts()["Global"]
    formula = recipe.model.config.flops_per_token(4096)
    assert 3 * sum(counted.values()) / 4096 == pytest.approx(formula["matmul"] + formula["head"], rel=0.005)


def test_every_part_of_the_table_is_counted_once(capsys):
    found = plan(capsys, "--job.config_file", str(RECIPES / "hymo_debug.toml"))["parameters"]
    assert sum(part["stored"] for part in found["by_part"].values()) == found["total"]
    assert sum(part["active"] for part in found["by_part"].values()) == found["active"] < found["total"]


def test_live_bytes_counts_tensors_until_nothing_refers_to_them():
    with LiveBytes() as tracker:
        a = torch.zeros(100)
        b = a.view(10, 10) + 1
        del a
        b.mul_(2)
        assert tracker.live == 400
        assert sum(tracker.peak) == 800


def test_live_bytes_sees_what_autograd_keeps():
    layer, x = nn.Linear(8, 8, bias=False), torch.zeros(4, 8)
    with LiveBytes(ignored=[layer.weight, x]) as tracker:
        loss = layer(x).exp().sum()
        assert tracker.live == 4 * 8 * 4 + 4  # the result of exp, and the sum; the product is gone
        loss.backward()


def test_checkpointing_keeps_less_the_more_it_recomputes():
    modes = ("none", "selective", "full")
    held = [activations(job("hymo_debug", "--activation_checkpoint.mode", mode)).held for mode in modes]
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize("flags", [["--training.dtype", "bfloat16"], ["--data.packing", "document"]])
def test_memory_is_planned_for_either_dtype_and_packing(flags):
    assert activations(job("hymo_debug", *flags)).held > 0


def test_a_norm_keeps_its_input_and_a_number_a_row_as_on_cuda():
    x, weight = torch.zeros(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with LiveBytes(ignored=[x, weight]) as tracker, norms_of_cuda():
        y = F.rms_norm(x.exp(), (8,), weight, 1e-6).sum()
        assert tracker.live == 4 * (4 * 8 + 4 + 1)  # exp's result, the roots, the sum
        y.backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


def test_ops_of_ours_keep_what_they_keep_on_cuda():
    shapes = [(1, 64, 2, 32)] * 3 + [(1, 64, 2)] * 2 + [(2,)] * 2
    with FakeTensorMode():
        inputs = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        with LiveBytes(ignored=inputs) as tracker:
            o, _ = gated_delta_rule(*inputs)
            assert tracker.live > 2 * o.nbytes


# GiB on one H200 (docs/performance.md): the most allocated, and reserved where a run was recorded.
ONE = ("--training.global_batch_size", "4")  # a step of one micro-batch
UNCOMPILED = (*ONE, "--compile.no_enable")
EAGER = (*UNCOMPILED, "--parallelism.plan", "fsdp2", "--cuda_graph.no_enable")
MEASURED = [
    ("hymo_primary", ONE, 33.5, 43.2),
    ("hymo_primary", UNCOMPILED, None, 44.2),
    ("hymo_primary", (*UNCOMPILED, "--activation_checkpoint.mode", "full"), 19.3, None),
    ("hymo_primary", (*EAGER, "--moe_mixed_precision.no_enable"), 39.6, None),
    ("chimera_510m", (), 43.5, 49.6),
]
MEASURED_TOO = [
    ("hymo_primary", EAGER, 35.8, None),
    ("hymo_primary", (*EAGER, "--fused_gdn.no_enable"), 35.1, None),
    ("hymo_primary", (*EAGER, "--parallelism.expert_wrapping", "per_expert"), 37.4, None),
    ("swarm_blackwell_v2", (), 65.6, 75.4),
]


@pytest.mark.parametrize(
    ("name", "how", "allocated", "reserved"),
    [*MEASURED, *(pytest.param(*row, marks=pytest.mark.heavy) for row in MEASURED_TOO)],
)
def test_the_memory_that_was_measured_is_planned_to_10_percent(name, how, allocated, reserved):
    flags = ["--job.config_file", f"{RECIPES}/{name}.toml", "--job.overlay", f"{RECIPES}/scales/bundled_data.toml"]
    recipe = load([*flags, *how], needs_data=False)
    planned = memory_per_rank(recipe, footprint(recipe), 1)
    if allocated:
        assert planned["allocated"] / 2**30 == pytest.approx(allocated, rel=0.1)
    if reserved:
        assert planned["total"] / 2**30 == pytest.approx(reserved, rel=0.1)


def test_a_recording_is_made_before_there_is_optimizer_state_and_is_allocated_only_then():
    debug = ("--training.dtype", "bfloat16", "--parallelism.plan", "zero1")
    record = ("--cuda_graph.enable", "--cuda_graph.components", "model")
    recipes = [job("hymo_debug", *debug), job("hymo_debug", *debug, *record)]
    launched, recorded = (memory_per_rank(recipe, footprint(recipe), 1) for recipe in recipes)
    assert launched["allocated"] == launched["total"] == recorded["total"]
    assert recorded["allocated"] == recorded["total"] - recorded["optimizer"]


def test_gradients_of_earlier_micro_batches_stand_beside_the_activations_and_those_of_an_only_one_come_later():
    several = job("hymo_debug", "--training.dtype", "bfloat16")
    batch = ("--training.global_batch_size", str(several.training.local_batch_size))
    only = job("hymo_debug", "--training.dtype", "bfloat16", *batch)
    whole = footprint(several)
    gradients = [memory_per_rank(recipe, whole, 1)["gradients"] for recipe in (several, only)]
    assert gradients[0] == 4 * sum(whole.by_role.values()) > gradients[1]


def test_zero1_keeps_weights_and_sums_of_gradients_whole_and_shards_the_rest():
    recipe = job("hymo_debug", "--training.dtype", "bfloat16", "--parallelism.plan", "zero1")
    whole = footprint(recipe)
    one, four = memory_per_rank(recipe, whole, 1), memory_per_rank(recipe, whole, 4)
    assert [four[kind] / one[kind] for kind in ("weights", "optimizer")] == [1 / 4, 1 / 4]
    for planned in (one, four):
        assert 2 * whole.parameters < planned["gathered"] == sum(whole.computing.values()) < 2.2 * whole.parameters
        assert planned["gradients"] == 4 * whole.parameters


def test_experts_that_compute_in_fp32_keep_more_and_are_gathered_in_it():
    flags = ("--training.dtype", "bfloat16", "--parallelism.plan", "zero1")
    mixed, exact = (job("hymo_debug", *flags, *more) for more in ((), ("--moe_mixed_precision.no_enable",)))
    assert activations(exact).held > activations(mixed).held
    with torch.device("meta"):
        routed = sum(p.numel() for name, p in exact.model.build().named_parameters() if ".experts." in name)
    assert sum(footprint(exact).computing.values()) - sum(footprint(mixed).computing.values()) == 2 * routed


def test_the_recurrence_in_pytorch_keeps_less():
    fused, plain = (
        activations(job("hymo_debug", "--training.dtype", "bfloat16", *more))
        for more in ((), ("--fused_gdn.no_enable",))
    )
    assert plain.held < fused.held


def test_larger_chunks_keep_larger_matrices_and_count_the_same_flops():
    tuned, larger = (
        job("hymo_debug", "--training.dtype", "bfloat16", *more) for more in ((), ("--model.mixers.gdn.chunk", "32"))
    )
    config, training = tuned.model.config, tuned.training
    rows, layers = training.local_batch_size, sum(step.block == "gdn" for step in config.steps())

    def kept(chunk: int) -> int:  # T and P in bf16 and twelve vectors in fp32, of the chunks that a head may need
        return (rows * training.seq_len // chunk + rows) * (2 * 2 * chunk**2 + 12 * 4 * chunk)

    more = layers * config.mixers["gdn"].config.heads * (kept(32) - kept(16))
    assert activations(larger).held - activations(tuned).held == more > 0
    assert larger.model.config.flops_per_token(1024) == config.flops_per_token(1024)


def test_a_compiled_norm_needs_its_input_and_what_its_gradient_comes_through():
    """Taken apart by the compiler, not stood in for: gradients that depend on nothing need nothing kept."""
    x, into, gate = (torch.zeros(64, 64, requires_grad=needed) for needed in (False, True, True))
    run = torch.compile(lambda: F.rms_norm(x @ into, (64,)) * (x @ gate), backend="aot_eager_decomp_partition")
    with norms_of_cuda():
        run().sum().backward()
        with LiveBytes(ignored=[x, into, gate]) as tracker:
            y = run()
    assert tracker.live >= 3 * y.nbytes  # both products and the result


def test_a_compiled_model_keeps_less():
    flags = ("--training.dtype", "bfloat16")
    eager, compiled = (activations(job("hymo_debug", *flags, *more)) for more in ((), ("--compile.enable",)))
    assert compiled.held < 0.99 * eager.held and sum(compiled.peak) < sum(eager.peak)


def test_reduced_gradients_take_the_place_of_their_sums():
    recipe = job("hymo_debug", "--parallelism.plan", "zero1", "--cuda_graph.enable", "--cuda_graph.components", "model")
    whole = footprint(recipe)
    assert memory_per_rank(recipe, whole, 4)["gradients"] == 4 * sum(whole.by_role.values())


def test_states_are_shared_by_the_shards_but_not_by_the_replicas_of_hybrid_sharding():
    recipe = job("hymo_debug", "--training.global_batch_size", "64")
    whole = footprint(recipe)
    one, four = memory_per_rank(recipe, whole, 1), memory_per_rank(recipe, whole, 4)
    for kind in ("weights", "gradients", "optimizer"):
        assert four[kind] == one[kind] / 4
    assert four["activations"] == one["activations"]
    assert one["weights"] == 4 * sum(whole.by_role.values())
    flags = ["--parallelism.data_parallel_replicate_degree", "2", "--training.global_batch_size", "32"]
    hybrid = load(["--job.config_file", str(RECIPES / "hymo_debug.toml"), *flags], needs_data=False, ranks=4)
    assert memory_per_rank(hybrid, whole, 4)["weights"] == one["weights"] / 2


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_adamw_keeps_two_states_a_weight_and_normuon_one_and_what_travels_and_a_row(ns_dtype):
    whole = footprint(job("hymo_debug", "--optimizer.matrix.ns_dtype", ns_dtype))
    adamw = 8 * sum(n for role, n in whole.by_role.items() if role != "matrix")
    normuon = (4 + getattr(torch, ns_dtype).itemsize) * whole.by_role["matrix"]
    assert adamw + normuon < whole.optimizer_bytes < adamw + 1.1 * normuon


def test_time_and_cost_follow_from_the_stated_speed():
    found = estimate(job("hymo_debug"), H100)
    tps = 0.4 * 989.4e12 / found["flops_per_token"]["total"]
    assert found["time"]["seconds"] == pytest.approx(found["tokens"] / tps)
    assert found["time"]["cost"] == pytest.approx(2.0 * found["time"]["seconds"] / 3600)


def test_a_gpu_without_a_stated_peak_has_no_mfu_and_needs_a_stated_speed(capsys):
    flags = ("--job.config_file", str(RECIPES / "hymo_debug.toml"), "--gpu", "Abacus 3000")
    assert plan(capsys, *flags, "--mfu", "40")["time"]["seconds"] is None
    stated = plan(capsys, *flags, "--tps", "1000")
    assert stated["time"]["seconds"] == stated["tokens"] / 1000
    assert stated["time"]["mfu"] is None


def test_recipes_are_compared_side_by_side_with_the_same_flags(capsys):
    main(["--training.steps", "7", "--compare", *[str(RECIPES / "hymo_debug.toml")] * 2])
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines() if line.startswith("steps")] == [["steps", "7", "7"]]


def test_the_whole_plan_is_shown(capsys):
    main(["--job.config_file", str(RECIPES / "hymo_debug.toml"), "--mfu", "10", "--price", "1"])
    shown = capsys.readouterr().out
    for heading in ("stack", "parameters by role", "training FLOPs a token", "memory of one of 1 ranks", "GPU hours"):
        assert heading in shown


# Loops and shared parts -------------------------------------------------------------------------------


CHIMERA = {"chimera_279m": 278_664_160, "chimera_510m": 510_217_280, "chimera_1_1b": 1_072_527_280}
SWARM = {"chimera_1b_v2": 648e6, "swarm_354m": 354.2e6, "swarm_blackwell_v2": 1133.5e6, "swarm_spark": 357.4e6}


@pytest.mark.parametrize(("name", "published"), [*CHIMERA.items(), *SWARM.items()])
def test_chimera_and_swarm_have_the_parameters_of_the_design(name, published):
    recipe = job(name)
    with torch.device("meta"):
        built = sum(owned.parameter.numel() for owned in owned_parameters(recipe.model.build()))
    assert sum(stored for stored, _ in recipe.model.config.parameter_table().values()) == built
    assert built == published if name in CHIMERA else abs(built / published - 1) < 0.005


@pytest.mark.parametrize("name", ["uffn_640", "uffn_640_ghost", "swarm_blackwell_v1"])
def test_the_recipe_alone_counts_shared_ffns_borrowed_keys_and_shared_pools(name):
    recipe = job(name)
    with torch.device("meta"):
        built = sum(p.numel() for p in recipe.model.build().parameters())
    assert sum(stored for stored, _ in recipe.model.config.parameter_table().values()) == built


@pytest.mark.parametrize("name", ["chimera", "swarm", "uffn"])
def test_debug_sizes_stay_below_a_million_parameters(name):
    table = job(f"{name}_debug").model.config.parameter_table()
    assert sum(stored for stored, _ in table.values()) < 1e6


def test_attention_stands_where_the_design_puts_it():
    def layers(name: str) -> tuple[list[int], int]:
        config = job(name).model.config
        physical = {step.layer: step.block for step in config.steps()}
        return [layer for layer, block in physical.items() if "attention" in block], len(physical)

    assert layers("chimera_510m") == ([3, 7], 8)  # every fourth, counted in each zone
    assert layers("chimera_1_1b") == ([3, 9], 12)
    assert layers("chimera_1b_v2") == ([3, 7, 11], 12)
    assert layers("swarm_blackwell_v2") == ([4, 9], 14)  # every fifth of the model
    assert layers("uffn_640") == ([3, 7, 11, 15], 16)


def test_unique_and_virtual_parameters_are_those_the_paper_states():
    def unique(name: str) -> int:
        table = job(name).model.config.parameter_table()
        return sum(stored for path, (stored, _) in table.items() if path != "embedding")

    assert virtual_parameters(job("chimera_510m").model.config) == pytest.approx(787e6, rel=0.001)
    found = [unique(name) for name in ("chimera_510m", "chimera_1_1b", "swarm_354m")]
    assert found == pytest.approx([277e6, 761e6, 199e6], rel=0.005)


def test_without_loops_and_sharing_the_virtual_parameters_are_the_stored_ones():
    config = job("hymo_primary").model.config
    assert virtual_parameters(config) == sum(stored for stored, _ in config.parameter_table().values())


@pytest.mark.parametrize("name", ["chimera_510m", "swarm_blackwell_v2", "hymo_primary"])
def test_the_flops_of_all_loops_and_the_heads_are_the_flops_of_a_token(name):
    config = job(name).model.config
    loops = sum(row["flops"] for row in flops_by_loop(config, 2048))
    beside = 3 * config.heads() * 2 * config.dim * config.vocab_size
    beside += 3 * sum(config.mtp.config.flops(config.dim, 2048).values()) if config.mtp else 0
    assert loops + beside == pytest.approx(sum(config.flops_per_token(2048).values()))


def test_every_loop_does_the_same_work():
    rows = flops_by_loop(job("chimera_510m").model.config, 2048)
    assert [(row["zone"], row["loop"], row["steps"]) for row in rows] == [
        ("bottom", 0, 4), ("top", 0, 4), ("top", 1, 4), ("top", 2, 4)
    ]  # fmt: skip
    assert len({row["flops"] for row in rows}) == 1


def test_the_looped_zone_of_the_510m_is_277_mb_and_fits_in_no_cache():
    """The paper says 35 MB, and that an H100 keeps it in its 50 MB."""
    (zone,) = cache_residency(job("chimera_510m"))
    assert (zone["zone"], zone["loops"]) == ("top", 3)
    assert zone["bytes"] / 1e6 == pytest.approx(277, abs=1)
    assert zone["gpus"]["H100"]["share"] == pytest.approx(0.19, abs=0.005)
    assert all(held["share"] < 0.5 for held in zone["gpus"].values())
    assert cache_residency(job("hymo_primary")) == []


def test_a_cache_larger_than_a_zone_holds_all_of_it_and_not_more():
    [zone] = cache_residency(job("chimera_debug"))
    assert {gpu["share"] for gpu in zone["gpus"].values()} == {1.0}


def test_a_looped_and_shared_stack_is_shown(capsys):
    main(["--job.config_file", str(RECIPES / "swarm_debug.toml")])
    shown = capsys.readouterr().out
    for words in ("training FLOPs a token by loop", "an L2 cache holds", "shared.swarm_experts", "residual factors"):
        assert words in shown
