"""What two ranks do with checkpoints that are damaged, older, or not theirs, and with steps that are not finite."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from components.checkpoint.dcp import CheckpointError
from recipes import pretrain
from tests.recipes.runs import (
    State,
    assert_same_lines,
    assert_same_state,
    continued,
    kept,
    lines,
    restored,
    state,
    trained,
    weights,
)

SHORT = ("--training.steps", "6", "--checkpoint.interval", "2", "--validation.no_enable")


@cache
def short(folder: Path) -> State:
    """An unbroken run of six steps in `folder`/short, with checkpoints 2, 4, 6; its final state."""
    return kept(state(trained(folder / "short", *SHORT)), folder / "short" / "state.pt")


def refusal(folder: Path, *flags: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        restored(folder, *SHORT, *flags)
    return str(caught.value)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    sentences: list[str] = []
    ear = logging.Handler()
    ear.emit = lambda record: sentences.append(record.getMessage())
    logging.getLogger().addHandler(ear)
    yield sentences
    logging.getLogger().removeHandler(ear)


@contextmanager
def spoiled(spoil: Callable[[pretrain.Run, torch.Tensor], None]) -> Iterator[None]:
    """Between each backward and what follows, `spoil(run, loss sums)` has its way."""
    accumulate = pretrain.accumulate_gradients

    def accumulate_and_spoil(run, batches, counts):
        sums, aux = accumulate(run, batches, counts)
        spoil(run, sums)
        return sums, aux

    pretrain.accumulate_gradients = accumulate_and_spoil
    try:
        yield
    finally:
        pretrain.accumulate_gradients = accumulate


def test_validation_samples_checkpoints_and_logging_do_not_touch_the_training(folder: Path):
    flags = [
        "--validation.enable",
        "--validation.freq",
        "2",
        "--validation.prompts",
        "Fellow",
        "--checkpoint.no_enable",
    ]
    run = trained(folder / "watched", *SHORT, *flags, "--metrics.log_freq", "3")
    assert_same_state(state(run), short(folder))
    watched = [line for line in lines(folder / "watched") if "loss" in line]
    assert_same_lines(watched, [line for line in lines(folder / "short") if line["step"] in (1, 3, 6)])


# Checkpoints ----------------------------------------------------------------------------------------


def test_a_run_that_is_done_does_nothing_more(folder: Path):
    expected = short(folder)
    root = continued(folder / "short", folder / "done", step=6)
    assert_same_state(state(trained(root, *SHORT)), expected)
    assert_same_lines(lines(root), lines(folder / "short"))


def test_bf16_runs_save_their_weights_in_full_right_after_a_validation_too(folder: Path):
    """Gathered weights in the compute dtype must not be what is saved."""
    flags = [*SHORT[:-1], "--validation.freq", "2", "--training.dtype", "bfloat16"]
    run = trained(folder / "bf16", *flags)
    assert {view.local.dtype for view in pretrain.tensors(run).values()} == {torch.float32}
    root = continued(folder / "bf16", folder / "bf16-resumed", step=4)
    assert_same_state(state(trained(root, *flags)), state(run))
    assert_same_lines(lines(root), lines(folder / "bf16"))


def test_runs_with_bf16_masters_resume_bit_for_bit_and_not_as_fp32_ones(folder: Path):
    flags, step, rounded = [*SHORT, "--training.master_dtype", "bfloat16"], pretrain.train_step, []

    def note(run: pretrain.Run) -> None:
        weights = [weight for group in run.optimizer.groups.values() for weight in group.optimizer.weights()]
        rounded.append(all(torch.equal(weight, weight.bfloat16().float()) for weight in weights))

    with patch.object(pretrain, "train_step", lambda run, meter: note(run) or step(run, meter)):
        note(run := trained(folder / "rounded", *flags))
    assert all(rounded) and len(rounded) == 7, "before the first step, and after each"
    root = continued(folder / "rounded", folder / "rounded-resumed", step=4)
    assert "training.master_dtype: 'bfloat16' -> 'float32'" in refusal(root)
    assert_same_state(state(trained(root, *flags)), state(run))
    assert_same_lines(lines(root), lines(folder / "rounded"))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(folder: Path):
    expected = short(folder)
    root = continued(folder / "short", folder / "damaged", step=6)
    if dist.get_rank() == 0:
        with next((root / "checkpoint" / "step-6").glob("*.distcp")).open("r+b") as file:
            file.seek(100)
            file.write(b"damage")
    dist.barrier()
    with heard() as sentences:
        assert_same_state(state(trained(root, *SHORT)), expected)
    assert dist.get_rank() or any("step-6 is damaged" in sentence for sentence in sentences)
    assert_same_lines(lines(root), lines(folder / "short"))
    assert (root / "checkpoint" / "aside-1-step-6").is_dir()


def test_load_step_goes_back_to_an_earlier_checkpoint(folder: Path):
    expected = short(folder)
    root = continued(folder / "short", folder / "back", step=6)
    assert "there is no checkpoint" in refusal(root, "--checkpoint.load_step", "5")
    assert_same_state(state(trained(root, *SHORT, "--checkpoint.load_step", "4")), expected)
    assert_same_lines(lines(root), lines(folder / "short"))


def test_tensorboard_shows_every_step_once_after_going_back(folder: Path):
    short(folder)
    root = continued(folder / "short", folder / "shown", step=2)
    trained(root, *SHORT)
    if dist.get_rank() == 0:
        found = EventAccumulator(str(root / "tb")).Reload()
        steps = [event.step for event in found.Scalars("loss_metrics/global_avg_loss")]
        assert steps == [line["step"] for line in lines(root)] == [1, 2, 3, 4, 5, 6]


def test_the_best_checkpoint_is_one_that_was_validated_and_stays_the_best_after_a_resume(folder: Path):
    flags = ("--training.steps", "9", "--checkpoint.interval", "1", "--validation.enable", "--validation.freq", "2")

    def saved(run: pretrain.Run, step: int, **validation: float) -> int | None:
        """The best after a save at `step`."""
        run.progress.step, run.progress.validation = step, {f"validation/{k}": v for k, v in validation.items()}
        pretrain.save(run)
        return run.checkpoints.best()

    run = restored(folder / "best", *flags)
    assert saved(run, 3, loss=5.0) is None, "the loss of step 2, which was not saved"
    assert saved(run, 4, loss=6.0) == 4
    run = restored(folder / "best", *flags)
    assert saved(run, 6, loss=6.5) == 4 and run.progress.best_loss == 6.0
    assert saved(run, 8, loss=torch.nan) == 4 and saved(run, 9, loss=5.9) == 9


def test_a_new_run_starts_from_the_weights_of_another(folder: Path):
    expected = weights(short(folder))
    source = ("--checkpoint.initial_load_path", str(folder / "short" / "checkpoint" / "step-6"))
    for flags in (source, (*source, "--checkpoint.no_enable")):
        run = restored(folder / "started", *flags)
        found = state(run)
        assert run.progress == pretrain.Progress()
        assert_same_state({name: found[name] for name in expected}, expected)
        assert not any(found[name].any() for name in set(found) - set(expected)), "optimizer state came along"


def test_a_resumed_run_with_another_meaning_is_refused_and_the_key_named(folder: Path):
    short(folder)
    sentence = refusal(folder / "short", "--data.seed", "1", "--optimizer.matrix.momentum", "0.9")
    assert "data.seed: 0 -> 1" in sentence and "optimizer.matrix.momentum: 0.95 -> 0.9" in sentence
    assert "training.global_batch_size: 4 -> 8" in refusal(folder / "short", "--training.global_batch_size", "8")


def test_keys_of_length_cadence_speed_and_rates_may_change(folder: Path):
    short(folder)
    root = continued(folder / "short", folder / "longer", step=6)
    flags = "--training.steps 7 --checkpoint.interval 5 --optimizer.matrix.lr 0.01 --training.local_batch_size 2 "
    flags += "--model.ffns.experts.bias_speed 0.002 --metrics.log_freq 3 --validation.freq 50"
    assert trained(root, *flags.split()).progress.step == 7


def test_who_insists_may_change_what_a_run_means(folder: Path):
    short(folder)
    run = restored(folder / "short", *SHORT, "--data.seed", "1", "--checkpoint.allow_changes")
    assert run.progress.step == 6


def test_another_tokenizer_is_refused_also_for_initial_weights(folder: Path):
    short(folder)
    run = restored(folder / "elsewhere", *SHORT)
    values = run.checkpoints.__class__(folder / "short" / "checkpoint").values(6) | {"tokenizer": "another"}
    for refuse in (pretrain.refuse_another_run, pretrain.refuse_another_tokenizer):
        with pytest.raises(CheckpointError, match="another tokenizer"):
            refuse(run, 6 if refuse is pretrain.refuse_another_run else "checkpoint 6", values)


# Steps that are not finite --------------------------------------------------------------------------


def test_what_is_not_finite_on_one_rank_skips_the_update_on_all(folder: Path):
    found: list[tuple[State, pretrain.Progress]] = []

    def spoil(run: pretrain.Run, sums: torch.Tensor) -> None:
        found.append((state(run), run.progress.__class__(**vars(run.progress))))
        last = dist.get_rank() == dist.get_world_size() - 1
        if run.progress.step == 2 and last:
            run.model.norm.weight.grad.to_local()[0] = torch.nan
        if run.progress.step == 3 and last:
            sums[1] = torch.inf

    with spoiled(spoil):
        run = trained(folder / "spoiled", *SHORT)
    for step in (3, 4):
        assert_same_state(found[step][0], found[2][0])
        assert found[step][1].tokens == found[2][1].tokens
    assert [progress.skipped_in_a_row for _, progress in found] == [0, 0, 0, 1, 2, 0]
    assert (run.progress.step, run.progress.skipped_steps, run.progress.tokens) == (6, 2, 4 * 4 * 32)
    assert not torch.equal(found[5][0]["model.embedding"], found[4][0]["model.embedding"])
    skipped = [line for line in lines(folder / "spoiled") if line["step"] in (3, 4)]
    assert all(line["skipped_steps"] == line["step"] - 2 for line in skipped)
    assert not any(key.startswith("update_rms") for line in skipped for key in line), "no update, yet its size is told"


def test_too_many_skipped_steps_in_a_row_stop_the_run_with_what_was_saved_whole(folder: Path):
    def spoil(run: pretrain.Run, sums: torch.Tensor) -> None:
        if run.progress.step >= 2:
            sums[0] = torch.nan

    limit = ("--training.max_skipped_steps", "2", "--checkpoint.async_mode", "async")
    with spoiled(spoil), pytest.raises(pretrain.TrainingStopped, match="2 steps in a row up to step 4"):
        trained(folder / "stopped", *SHORT, *limit)
    assert (folder / "stopped" / "checkpoint" / "step-2" / "COMPLETE").is_file()
    assert restored(folder / "stopped", *SHORT).progress.step == 2
