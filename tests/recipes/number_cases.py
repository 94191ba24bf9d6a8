"""Whole runs on 4 ranks, then 2, then 1, in one folder: each launch compares with what those before it left there."""

import json
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from components.losses.targets import target_counts
from components.parallel.optional import UnavailableError
from components.parameters import initialise
from recipes import pretrain
from recipes.pretrain import Run
from recipes.validate import evaluating, validate
from tests.optimizers.recording import capture
from tests.recipes.runs import (
    assert_same_lines,
    assert_same_state,
    continued,
    kept,
    lines,
    restored,
    state,
    trained,
)

BARE = ("--checkpoint.no_enable", "--validation.no_enable", "--metrics.no_enable_tensorboard")
DOCUMENTS = (*BARE[1:], "--data.packing", "document", "--training.steps", "6", "--checkpoint.interval", "3")
BEFORE = {2: 4, 1: 2}  # the launch before this number of ranks


def own(folder: Path, name: str) -> Path:
    return folder / f"{name}-{dist.get_world_size()}"


@cache
def plain(folder: Path) -> Run:
    """The unbroken run that others are compared with, in own(folder, "plain")."""
    run = trained(own(folder, "plain"), "--metrics.no_enable_tensorboard")
    kept(state(run), own(folder, "plain") / "state.pt")
    return run


def test_twenty_steps_are_those_of_any_other_number_of_ranks(folder: Path):
    assert_same_state(state(plain(folder)), torch.load(folder / "plain-4" / "state.pt"), rtol=1e-5)
    assert_same_lines(lines(own(folder, "plain")), lines(folder / "plain-4"), rtol=1e-5)


def test_with_bf16_newton_schulz_their_losses_are_within_a_thousandth(folder: Path):
    """bf16 makes 1e-3 of a difference of 1e-7, which sends single tokens to other experts: losses, not weights."""
    if dist.get_world_size() == 2:
        return
    trained(own(folder, "bf16"), *BARE, "--optimizer.matrix.ns_dtype", "bfloat16")
    found, expected = ([only_losses(line) for line in lines(root)] for root in (own(folder, "bf16"), folder / "bf16-4"))
    assert_same_lines(found, expected, rtol=1e-3)


def only_losses(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key == "step" or "loss" in key}


def test_after_them_every_rank_holds_the_same_bits_of_router_norms_and_routing_bias(folder: Path):
    model = plain(folder).model
    weights = {name: p.full_tensor() for name, p in model.named_parameters() if "router" in name or "norm" in name}
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("bias_E")}
    assert len(weights) > 5 and all(bias.any() for bias in biases.values())
    for name, tensor in {**weights, **biases}.items():
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, tensor.contiguous())
        assert all(torch.equal(everywhere[0], other) for other in everywhere), name


def test_the_optimizer_is_given_the_clipped_gradient_of_the_weighted_mean_over_all_targets(folder: Path):
    """Of a step whose ranks have unequally many, since a document ends there, beside a plain model of the same initial
    values that sees all of its batches."""
    flags = (*BARE, "--data.packing", "document", "--training.steps", "200", "--training.max_norm", "0.3")
    run, given = restored(own(folder, "step"), *flags, "--lr_scheduler.warmup_ratio", "0.5"), {}
    text = pretrain.text(run.job, run.tokenizer, replace(run.place, rank=0, ranks=1))

    def targets_of(number: int) -> list[int]:
        """Of the main head, in each micro-batch of a step."""
        return [int(target_counts(batch, 1)) for batch in text.micro_batches(number)]

    number = next(n for n in range(90) if sum(targets_of(n)[::2]) != sum(targets_of(n)[1::2]))
    run.progress.step = number

    def take(factor: float, measure: bool) -> None:
        given.update({name: p.grad.full_tensor() for name, p in run.model.named_parameters()}, factor=factor)

    with patch.object(run.optimizer, "step", take):
        step = pretrain.train_step(run, pretrain.Meter(run))
    model = run.job.model.build()
    initialise(model, run.job.debug.seed)
    model.reset_buffers()
    outputs = [model(batch) for batch in text.micro_batches(number)]
    means = sum(o.loss_sums for o in outputs) / sum(o.target_counts for o in outputs)
    (means * torch.tensor([1.0, 0.3, 0.1])).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    assert norm > 0.6 and step.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert step.losses == pytest.approx(means.tolist(), rel=1e-5)
    assert given.pop("factor") == run.schedule.factor(number, 200) < 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(given.pop(name), parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert not given


def test_the_last_step_is_saved_and_validated_although_a_multiple_of_neither_interval(folder: Path):
    plain(folder)
    found = lines(own(folder, "plain"))
    assert [line["step"] for line in found if "loss" in line] == list(range(1, 21))
    assert [line["step"] for line in found if "validation/loss" in line] == [13, 20]
    assert sorted(os.listdir(own(folder, "plain") / "checkpoint")) == ["step-16", "step-20", "step-8"]


def test_held_out_text_cut_to_other_lengths_is_scored_too(folder: Path):
    plain(folder)
    for line in lines(own(folder, "plain")):
        if "validation/loss" in line:
            for value in ("loss", "ppl", "bpb"):
                assert line[f"validation/at_32/{value}"] == pytest.approx(line[f"validation/{value}"], rel=1e-12)
                assert line[f"validation/at_80/{value}"] > 0
            assert line["validation/at_80/loss"] != line["validation/loss"]


def test_a_validation_is_what_its_batches_give_by_hand(folder: Path):
    """Every rank goes through all of them, and bytes are counted in the text."""
    run = plain(folder)
    found, model, held_out = validate(run.model, run.held_out, run.place), run.model, run.held_out
    nats, ids, squares, agreed, tried = 0.0, [], torch.zeros(3), torch.zeros(2), torch.zeros(2)
    with evaluating(model), torch.no_grad():
        for source in held_out.sources:
            for number, batch in enumerate(held_out.batches(source)):  # rows of one sequence
                target_BT, chance_BTV = batch.tokens_BT1[:, 1:], model.logits(batch)[0].double().log_softmax(-1)
                nats -= chance_BTV.gather(-1, target_BT[..., None]).sum().item()
                ids += target_BT.flatten().tolist()
                if number == 0:
                    squares += model.gradient_norms(batch).square()
                    agreed, tried = (a + b for a, b in zip((agreed, tried), model.acceptance(batch), strict=True))
    size = len(run.tokenizer.decode_bytes([i for i in ids if i != run.tokenizer.end_id]))
    expected = {"loss": nats / len(ids), "ppl": math.exp(nats / len(ids)), "bpb": nats / math.log(2) / size}
    for d in (1, 2):
        expected[f"gradient_ratio_mtp/{d}"] = (squares[d] / squares[0]).sqrt().item()
        expected[f"acceptance_mtp/{d}"] = (agreed[d - 1] / tried[d - 1]).item()
    for name, value in expected.items():
        assert found[f"validation/{name}"] == pytest.approx(value, rel=1e-5), name


def test_a_logged_step_tells_what_the_optimizer_took_on_every_rank(folder: Path):
    plain(folder)
    written = (own(folder, "plain") / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, written):
        if "loss" in line:
            found = [line[f"time/orthogonalising/{rank}"] for rank in range(dist.get_world_size())]
            assert all(0 <= s < line[f"time/optimizer/{rank}"] for rank, s in enumerate(found)) and any(found)


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit_also_with_loader_threads(folder: Path):
    expected = state(plain(folder))
    root = continued(own(folder, "plain"), own(folder, "resumed"), step=16)
    assert_same_state(state(trained(root, "--data.workers", "2")), expected)
    assert_same_lines(lines(root), lines(own(folder, "plain")))


def test_so_it_is_when_the_resumed_run_records_its_optimizer(folder: Path):
    flags = ("--cuda_graph.enable", "--cuda_graph.components", "optimizer")
    root = continued(own(folder, "plain"), own(folder, "recorded"), step=16)
    recorder = patch.object(pretrain, "capture", side_effect=capture)
    with recorder as recorder, patch.object(pretrain, "require_cuda"):
        run = trained(root, "--metrics.no_enable_tensorboard", *flags)
    assert recorder.called
    assert_same_state(state(run), state(plain(folder)))


def test_so_it_is_with_packed_documents(folder: Path):
    expected = state(trained(own(folder, "documents"), *DOCUMENTS, "--data.workers", "2"))
    root = continued(kept_folder := own(folder, "documents"), own(folder, "documents-resumed"), step=3)
    assert_same_state(state(trained(root, *DOCUMENTS)), expected)
    assert_same_lines(lines(root), lines(kept_folder))
    kept(expected, kept_folder / "state.pt")


def test_a_run_that_insists_on_recording_is_refused_without_a_device_before_its_model_is_built(folder: Path):
    without = patch.object(torch.cuda, "is_available", return_value=False)
    refused = pytest.raises(UnavailableError, match=r"\[cuda_graph\] cannot be switched on: there is no CUDA device")
    with without, patch.object(pretrain, "prepare_model") as built, refused:
        restored(own(folder, "refused"), "--cuda_graph.enable", "--cuda_graph.components", "optimizer")
    assert not built.called


def test_a_run_goes_on_where_another_number_of_ranks_left_it(folder: Path):
    """Four ranks make 8 steps, two the next 8, one the rest."""
    if dist.get_world_size() == 4:
        return
    source, step = {2: (folder / "plain-4", 8), 1: (folder / "moved-2", 16)}[dist.get_world_size()]
    root = continued(source, own(folder, "moved"), step)
    assert_same_state(state(trained(root)), torch.load(folder / "plain-4" / "state.pt"), rtol=1e-5)
    assert_same_lines(lines(root), lines(folder / "plain-4"), rtol=1e-5)


def test_so_it_does_with_packed_documents(folder: Path):
    if dist.get_world_size() == 4:
        return
    before = folder / f"documents-{BEFORE[dist.get_world_size()]}"
    root = continued(before, own(folder, "documents-moved"), step=3)
    assert_same_state(state(trained(root, *DOCUMENTS)), torch.load(before / "state.pt"), rtol=1e-5)
    assert_same_lines(lines(root), lines(before), rtol=1e-5)
