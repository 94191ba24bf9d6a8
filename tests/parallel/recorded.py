"""Recorded mixers beside plain ones, in a process of its own on one GPU.

python -m tests.parallel.recorded    every `test_*`; the last line is their verdicts, "" for nothing, as JSON
"""

import json
import traceback

import numpy as np
import torch
import torch.nn.functional as F

from components.data.batch import Batch
from components.data.packing import pack
from components.interfaces import Context
from components.mixers.mla import MLA
from components.parallel import process_group
from components.parallel.apply import Prepared
from components.parallel.cuda_graph import WholeMixer, whole_mixers
from components.parallel.micro_batch import capture
from components.parameters import initialise, owned_parameters
from tests.models.families import FAMILIES
from tests.models.tiny import batch, tokens
from tests.parallel.plans import WHOLE, ZERO1
from tests.parallel.training import accumulate, joint_optimizer, one_step, prepared, whole
from tests.ranks import sentences

RECORDED = {"cuda_graph": {"enable": True}}
PRIMARY = MLA.Config(heads=16, kv_heads=4, q_rank=224, kv_rank=128, head_dim=128, value_dim=128, rotary_dim=32)


def gradients(plan: dict, steps: int = 0, record: bool = False, **changes) -> dict[str, torch.Tensor]:
    """The losses and all gradients of a global batch of four micro-batches, after `steps` optimizer steps, recorded
    ones if `record`."""
    parts = prepared(plan, dtype=torch.bfloat16, **changes)
    model = parts.model
    recorded = [mixer.recording for mixer in whole_mixers(model)]
    assert all(recorded) and len(recorded) == (2 if plan.get("cuda_graph") == RECORDED["cuda_graph"] else 0)
    optimizer = joint_optimizer(model, {})
    if record:
        optimizer.record(capture)
    for step in range(steps):
        one_step(parts, optimizer, step)
    losses, counts = accumulate(parts, steps)
    found = {owned.name: whole(owned.parameter.grad) for owned in owned_parameters(model)}
    return found | {"losses": losses} | counts


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        error = (found[key].double() - value.double()).norm() / value.double().norm().clamp(min=1e-12)
        assert error <= rtol, f"{key}: relative error {error:.2e}"


def test_losses_and_every_gradient_are_those_of_the_plain_path():
    """Four micro-batches accumulate, so a gradient that lay where the next replay writes would show."""
    expected = gradients({})
    same(gradients(RECORDED), expected, rtol=2e-2)
    same(gradients(WHOLE), expected, rtol=2e-2)


def test_a_recorded_micro_batch_gives_bitwise_what_its_launches_give():
    same(gradients(WHOLE, steps=2), gradients(ZERO1, steps=2), rtol=0)


def test_recorded_updates_give_bitwise_what_plain_ones_give_under_every_plan():
    for plan in (ZERO1, WHOLE, {}):
        same(gradients(plan, steps=3, record=True), gradients(plan, steps=3), rtol=0)


def test_a_recorded_micro_batch_with_experts_in_fp32_gives_bitwise_what_its_launches_give():
    exact = {"moe_mixed_precision": {"enable": False}}
    same(gradients({**WHOLE, **exact}, steps=2), gradients({**ZERO1, **exact}, steps=2), rtol=0)


def test_recordings_see_the_weights_and_routing_biases_that_the_optimizer_left():
    expected = gradients({}, steps=2)
    for plan in (RECORDED, WHOLE):
        same({"losses": gradients(plan, steps=2)["losses"]}, {"losses": expected["losses"]}, rtol=2e-3)


def test_a_micro_batch_with_loops_and_a_shared_pool_records():
    for family in ("chimera", "swarm", "ghost"):
        same(gradients(WHOLE, steps=1, **FAMILIES[family]), gradients(ZERO1, steps=1, **FAMILIES[family]), rtol=0)


def test_a_recorded_micro_batch_of_packed_documents_sees_each_batchs_own_documents():
    plain, recorded = (prepared(plan, dtype=torch.bfloat16, packing="document") for plan in (ZERO1, WHOLE))
    for seed in range(3):
        rows, scale_H = documents(seed), torch.ones(3, device="cuda")
        same(_output(recorded, rows, scale_H), _output(plain, rows, scale_H), rtol=0)


def documents(seed: int) -> Batch:
    """One row of 16 positions with a boundary that moves with the seed."""
    row = tokens(rows=1, length=16, seed=seed)[0].numpy()
    return pack([(row, np.array([5 + 3 * seed]))], np.array([seed]), "document").to(torch.device("cuda", 0))


def _output(parts: Prepared, batch: Batch, scale_H: torch.Tensor) -> dict[str, torch.Tensor]:
    parts.plan.clear_gradients()
    output = parts.micro_batch(batch, scale_H)
    parts.plan.reduce_gradients()
    gradients = {owned.name: whole(owned.parameter.grad) for owned in owned_parameters(parts.model)}
    return {"losses": output.loss_sums, **gradients, **output.aux}


def test_a_recorded_micro_batch_recomputes_and_compiles():
    expected = gradients({})
    for more in ({"activation_checkpoint": {"mode": "full"}}, {"compile": {"enable": True, "backend": "inductor"}}):
        found = gradients({**WHOLE, **more})
        same({"losses": found["losses"]}, {"losses": expected["losses"]}, rtol=2e-3)


def test_recomputed_blocks_replay_the_same():
    plan = RECORDED | {"activation_checkpoint": {"mode": "full"}}
    same(gradients(plan), gradients(RECORDED), rtol=2e-2)


def test_compiled_blocks_run_around_recordings():
    plan = RECORDED | {"compile": {"enable": True}, "parallelism": {"expert_wrapping": "per_expert"}}
    found, expected = gradients(plan), gradients({})
    same({"losses": found["losses"]}, {"losses": expected["losses"]}, rtol=2e-3)


def test_validation_of_another_shape_runs_plain():
    model, plain = (prepared(plan, dtype=torch.bfloat16).model.eval() for plan in (RECORDED, {}))
    rows = batch(tokens(rows=3, length=24)).to(torch.device("cuda", 0))
    with torch.no_grad():
        same({"losses": model(rows).loss_sums}, {"losses": plain(rows).loss_sums}, rtol=2e-3)


def test_training_on_another_shape_is_refused():
    model = prepared(RECORDED, dtype=torch.bfloat16).model
    try:
        model(batch(tokens(rows=3, length=24)).to(torch.device("cuda", 0)))
    except ValueError as error:
        assert "recorded for micro-batches of (1, 16)" in str(error)
    else:
        raise AssertionError("the recording took a micro-batch of another shape")


def test_latent_attention_at_the_primarys_size_gives_the_plain_outputs_and_gradients():
    """Two replays, each against the plain mixer with the same inputs: the second must not see the first's."""
    with torch.device("cuda"):
        mixer = WholeMixer(MLA(PRIMARY, dim=896, layer=0, branches=40), torch.bfloat16)
    initialise(mixer, 0)
    position_BT = torch.arange(4096, device="cuda").expand(4, 4096).contiguous()
    inputs = [torch.randn(4, 4096, 896, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    expected = [_run(mixer, x, position_BT) for x in inputs]
    mixer.recording = torch.cuda.make_graphed_callables(mixer.recordable, mixer.sample(4, 4096, 896))
    mixer.shape = (4, 4096)
    for x, plain in zip(inputs, expected, strict=True):
        same(_run(mixer, x, position_BT), plain, rtol=1e-2)


def _run(mixer: WholeMixer, x_BTD: torch.Tensor, position_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    x_BTD = x_BTD.clone().requires_grad_()
    y_BTD, _ = mixer(F.rms_norm(x_BTD, x_BTD.shape[-1:]), Context(position_BT))
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    found = torch.autograd.grad(y_BTD.square().sum(), [x_BTD, *parameters])
    return {"output": y_BTD.detach().clone()} | {n: g.clone() for n, g in zip(("input", *names), found, strict=True)}


def main() -> None:
    process_group.init(60, "cuda")
    found = {name: _raised(globals()[name]) for name in sentences(__spec__.name)}
    print(json.dumps(found))
    process_group.shutdown()


def _raised(function) -> str:
    try:
        function()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main()
