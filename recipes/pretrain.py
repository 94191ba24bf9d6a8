"""Pretrain a language model from a recipe, on one process or many, from scratch or from where it stopped.

    python -m recipes.pretrain --job.config_file train_configs/hymo_debug.toml
    torchrun --nproc_per_node=4 -m recipes.pretrain --job.config_file train_configs/hymo_primary.toml

Top to bottom: `main` (the process), `train` (the run), `loop` and `train_step` (one update), then what hangs off the
loop: logging, validation, checkpoints. Everything that is computed lives in components.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from components.checkpoint.checkpointer import Checkpointer
from components.checkpoint.dcp import CheckpointError
from components.checkpoint.folder import locate
from components.checkpoint.random_state import random_states, restore_random_states
from components.checkpoint.signals import StopRequest
from components.checkpoint.state import model_state, optimizer_state
from components.data.batch import Batch
from components.data.heldout import HeldOut, held_out_at
from components.data.loader import TrainData
from components.data.tokenizers import Tokenizer
from components.losses.targets import target_counts
from components.metrics.device import memory_values
from components.metrics.expert_load import load_statistics
from components.metrics.flops import peak_tflops, throughput
from components.metrics.profiling import Profiler
from components.metrics.reduce import reduce_scalars
from components.metrics.sinks import MetricLog
from components.models.stacked_lm import StackedLM
from components.optimizers.roles import JointOptimizer, build_optimizers
from components.parallel.apply import OPTIMIZER, prepare_model
from components.parallel.micro_batch import MicroBatch, capture
from components.parallel.optional import UnavailableError, attempt, require_cuda
from components.parallel.plan import Plan
from components.parallel.process_group import Place, StepWatch, init, set_timeout, shutdown
from recipes.banner import banner, farewell
from recipes.job import Job, load_or_exit, refuse_unwritable, refused_changes, to_table, write_resolved
from recipes.result import write_result
from recipes.validate import continue_prompt, validate, validate_at
from registry import RecipeError

FORMAT = 1  # of what `save` writes beside the tensors
LARGE_NORM = 10.0  # of the gradient before clipping: worth a warning


class TrainingStopped(Exception):
    """The run cannot go on; the message says why and what to do."""


@dataclass
class Progress:
    """Where a run stands: everything that is neither tensor nor random state. Saved with every checkpoint."""

    step: int = 0  # optimizer steps taken, skipped ones included
    tokens: int = 0  # trained positions
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_loss: float | None = None  # lowest validation loss of a saved checkpoint
    validation: dict[str, float] = field(default_factory=dict)  # the newest


class MicroBatches(Protocol):
    """What a run trains on; `TrainData` is one."""

    def micro_batches(self, step: int) -> Iterable[Batch]: ...


@dataclass
class Run:
    """Everything that one run is made of."""

    job: Job
    place: Place
    tokenizer: Tokenizer | None  # None where other data took the text's place
    model: StackedLM
    plan: Plan
    micro_batch: MicroBatch
    optimizer: JointOptimizer
    schedule: object
    data: MicroBatches
    held_out: HeldOut | None
    held_out_at: dict[int, HeldOut]  # by sequence length, beside the training's
    checkpoints: Checkpointer | None
    stop: StopRequest
    progress: Progress = field(default_factory=Progress)


def main(arguments: list[str]) -> None:
    job = load_or_exit(arguments)
    try:
        place = init(job.comm.init_timeout_seconds)
    except ValueError as error:
        sys.exit(f"stopped: {error}")
    stop = StopRequest()  # listens to the very end: a signal after the last step must not fail a run that is done
    try:
        train(job, place, stop)
    except (CheckpointError, RecipeError, TrainingStopped, UnavailableError) as error:
        if place.rank == 0:
            print(f"stopped: {error}", file=sys.stderr, flush=True)
        shutdown(1)
    shutdown(0)


def train(job: Job, place: Place, stop: StopRequest) -> Run:
    """The run: build, resume, step until done or asked to stop, say where everything is. Returns it as it ended."""
    refuse_unwritable(job.job.dump_folder, "job.dump_folder")  # before anybody waits for a model to be built
    run = build(job, place, stop)
    restore(run)
    run.optimizer.round_weights()
    run.plan.refresh_weights()
    if place.rank == 0:
        write_resolved(job, job.job.dump_folder)
        banner(run)
    with closing(open_log(run)) as log, closing(StepWatch(place)) as watch, profiler(job, place) as trace:
        loop(run, log, watch, trace)
    if place.rank == 0:
        if run.progress.step >= job.training.steps:
            write_result(run)
        farewell(run)
    return run


def loop(run: Run, log: MetricLog, watch: StepWatch, trace: Profiler) -> None:
    """Steps, and what is due after each, until the last one or until some rank was asked to stop."""
    job, progress, last = run.job, run.progress, run.job.training.steps
    meter, limit = Meter(run), job.comm.init_timeout_seconds  # of the first step, which compiles
    try:
        while progress.step < last:
            with watch.step(progress.step + 1, limit):
                step = train_step(run, meter)
            if logged(run):
                log.log(progress.step, meter.values(step))
            if run.held_out and due(progress.step, job.validation.freq, last):
                log_validation(run, log)
            if run.checkpoints and (step.stop or due(progress.step, job.checkpoint.interval, last)):
                save(run)
            trace.step(progress.step)
            if step.stop:
                break
            limit = job.comm.train_timeout_seconds
            set_timeout(limit)
    finally:
        if run.checkpoints:
            run.checkpoints.wait()


def logged(run: Run) -> bool:
    """Whether the step just made gets a line: the first one shows at once that a run is alive."""
    return run.progress.step == 1 or due(run.progress.step, run.job.metrics.log_freq, run.job.training.steps)


def due(step: int, interval: int, last: int) -> bool:
    return step % interval == 0 or step == last


# Building -------------------------------------------------------------------------------------------


def build(job: Job, place: Place, stop: StopRequest, data: MicroBatches | None = None) -> Run:
    """Model, optimizer, data and checkpoints as the recipe says, at their initial values; `data` if it is given takes
    the place of the recipe's text."""
    set_numerics(job)
    if job.cuda_graph.enable and job.cuda_graph.on_failure == "error":  # told before anybody waits for a model
        attempt("cuda_graph", "error", require_cuda)
    training, tokenizer = job.training, job.tokenizer.build() if data is None else None
    prepared = prepare_model(
        job.model,
        parallelism=job.parallelism,
        fused_gdn=job.fused_gdn,
        moe_mixed_precision=job.moe_mixed_precision,
        activation_checkpoint=job.activation_checkpoint,
        compile=job.compile,
        cuda_graph=job.cuda_graph,
        micro_batch=(training.local_batch_size, training.seq_len),
        packing=job.data.packing,
        dtype=getattr(torch, training.dtype),
        seed=job.debug.seed,
        device=place.device,
        world=place.ranks,
    )
    optimizer = build_optimizers(
        prepared.model,
        {role: getattr(job.optimizer, role) for role in job.optimizer.__annotations__},
        getattr(torch, training.master_dtype),
    )
    if job.cuda_graph.enable and OPTIMIZER in job.cuda_graph.components:
        attempt("cuda_graph", job.cuda_graph.on_failure, lambda: optimizer.record(capture))
    return Run(
        job=job,
        place=place,
        tokenizer=tokenizer,
        model=prepared.model,
        plan=prepared.plan,
        micro_batch=prepared.micro_batch,
        optimizer=optimizer,
        schedule=job.lr_scheduler.build(),
        data=text(job, tokenizer, place) if data is None else data,
        held_out=held_out(job, tokenizer) if job.validation.enable else None,
        held_out_at=held_out_at(job.data, tokenizer, job.validation, job.training) if job.validation.enable else {},
        checkpoints=checkpoints(job) if job.checkpoint.enable else None,
        stop=stop,
    )


def set_numerics(job: Job) -> None:
    torch.manual_seed(job.debug.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job.training.tf32
    if job.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def text(job: Job, tokenizer: Tokenizer, place: Place) -> TrainData:
    training = job.training
    return TrainData(
        job.data,
        tokenizer,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        rank=place.rank,
        world_size=place.ranks,
        pin_memory=place.device.type == "cuda",
    )


def held_out(job: Job, tokenizer: Tokenizer) -> HeldOut:
    return HeldOut(
        job.data,
        tokenizer,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
        number=job.validation.batches,
        sources=job.validation.sources,
    )


def checkpoints(job: Job) -> Checkpointer:
    return Checkpointer(
        os.path.join(job.job.dump_folder, job.checkpoint.folder),
        keep_latest_k=job.checkpoint.keep_latest_k,
        keep_best=job.checkpoint.keep_best,
        async_mode=job.checkpoint.async_mode,
    )


def open_log(run: Run) -> MetricLog:
    return MetricLog.open(
        run.job.job.dump_folder,
        rank=run.place.rank,
        steps=run.job.training.steps,
        restored_step=run.progress.step,
        enable_tensorboard=run.job.metrics.enable_tensorboard,
    )


def profiler(job: Job, place: Place) -> Profiler:
    return Profiler(
        job.job.dump_folder,
        rank=place.rank,
        freq=job.profiling.profile_freq,
        enable_profiling=job.profiling.enable_profiling,
        enable_memory_snapshot=job.profiling.enable_memory_snapshot,
    )


# One step -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one optimizer step gave, the same on every rank."""

    losses: list[float]  # nats per target: main head, then each MTP depth; 0 where the batch has no target for one
    grad_norm: float  # before clipping
    factor: float  # of the schedule
    counts: dict[str, list[float]]  # choices of each expert, by layer
    updated: bool  # False where it was skipped
    stop: bool  # somebody asked the run to stop


def train_step(run: Run, meter: "Meter") -> Step:
    """Forward and backward over this rank's micro-batches, then one update, unless something is not finite."""
    progress, training = run.progress, run.job.training
    with meter.waiting():
        batches = [batch.to(run.place.device) for batch in run.data.micro_batches(progress.step)]
    counts = global_target_counts(run, batches)
    sums, aux = accumulate_gradients(run, batches, counts)
    norm = run.optimizer.clip(training.max_norm)

    # The step's one reduction over ranks and its one wait for the device.
    everywhere = reduce_scalars(
        {"losses": sums, "stop": run.stop.flag, **aux}, {"norm": norm, "targets": counts}, device=run.place.device
    )
    losses = [total / max(count, 1) for total, count in zip(everywhere["losses"], everywhere["targets"], strict=True)]
    norm, choices = everywhere["norm"], {name: everywhere[name] for name in aux}
    factor = run.schedule.factor(progress.step, training.steps)
    progress.step += 1
    finite = all(map(math.isfinite, [norm, *losses]))
    if finite:
        update(run, factor, norm, choices)
    else:
        skip(run, losses, norm)
    run.optimizer.zero_grad()
    return Step(losses, norm, factor, choices, updated=finite, stop=everywhere["stop"] > 0)


def global_target_counts(run: Run, batches: list[Batch]) -> Tensor:
    """Targets of each head in the whole global batch, fp32 (heads,): what a loss sum is divided by before backward,
    so that every target weighs the same wherever it lies."""
    heads = run.model.config.heads()
    counts = torch.stack([target_counts(batch, heads) for batch in batches]).sum(0).float()
    dist.all_reduce(counts)
    return counts


def accumulate_gradients(run: Run, batches: list[Batch], counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the global batch's mean loss into `.grad`; this rank's loss sums and statistics."""
    run.plan.clear_gradients()
    weights = torch.tensor(run.model.config.loss_weights(), device=run.place.device)
    # Plans average gradients over ranks; the sum over ranks is what a mean over all targets needs.
    scale = run.place.ranks * weights / counts.clamp(min=1)
    sums, aux = torch.zeros_like(counts), {}
    for batch in batches:
        output = run.micro_batch(batch, scale)
        sums += output.loss_sums
        for name, value in output.aux.items():
            aux[name] = aux[name] + value if name in aux else value
    run.plan.reduce_gradients()
    return sums, aux


def update(run: Run, factor: float, norm: float, choices: dict[str, list[float]]) -> None:
    """Move weights and routing biases by the gradients in `.grad`."""
    progress, place = run.progress, run.place
    if norm > LARGE_NORM and place.rank == 0:
        print(f"step {progress.step}: gradient norm {norm:.1f} before clipping", file=sys.stderr, flush=True)
    run.optimizer.step(factor, measure=logged(run))
    run.plan.refresh_weights()
    run.model.update_balance(on_device(choices, place.device))
    progress.tokens += run.job.training.tokens_per_step
    progress.skipped_in_a_row = 0


def on_device(counts: dict[str, list[float]], device: torch.device) -> dict[str, Tensor]:
    """Lists of numbers as tensors, in one copy for all of them, which waits for nothing that the device has to do."""
    flat = torch.tensor([n for members in counts.values() for n in members], pin_memory=device.type == "cuda")
    parts = flat.to(device, non_blocking=True).split([len(members) for members in counts.values()])
    return dict(zip(counts, parts, strict=True))


def skip(run: Run, losses: list[float], norm: float) -> None:
    """Leave weights and optimizer as they are after a step that is not finite; give up after too many in a row."""
    progress, limit = run.progress, run.job.training.max_skipped_steps
    progress.skipped_steps += 1
    progress.skipped_in_a_row += 1
    if run.place.rank == 0:
        print(f"step {progress.step} skipped: loss {losses}, gradient norm {norm}", file=sys.stderr, flush=True)
    if progress.skipped_in_a_row >= limit:
        raise TrainingStopped(
            f"{limit} steps in a row up to step {progress.step} had a loss or gradient norm that is not finite; lower "
            "the learning rates or resume from an earlier checkpoint ([checkpoint] load_step)"
        )


# Metrics --------------------------------------------------------------------------------------------


class Meter:
    """Times the loop and turns a step into the values of a log line."""

    def __init__(self, run: Run):
        self.run = run
        self.flops = sum(run.model.config.flops_per_token(run.job.training.seq_len).values())
        on_cuda = run.place.device.type == "cuda"
        self.peak = peak_tflops(torch.cuda.get_device_name(run.place.device)) if on_cuda else None
        self._data_seconds = 0.0
        self._since, self._first_step = time.perf_counter(), run.progress.step

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the loop waits for data."""
        since = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - since

    def values(self, step: Step) -> dict[str, float | None]:
        """The line of a logged step, by the names of metrics.jsonl. Times are since the line before."""
        run, progress = self.run, self.run.progress
        weights = run.model.config.loss_weights()
        values = {"loss": step.losses[0]}
        values |= {f"loss_mtp/{d}": loss for d, loss in enumerate(step.losses[1:], start=1)}
        values["loss_total"] = sum(w * loss for w, loss in zip(weights, step.losses, strict=True))
        values |= {"grad_norm": step.grad_norm, "skipped_steps": progress.skipped_steps, "tokens": progress.tokens}
        values |= self._speed()
        values |= memory_values(run.place.device)
        values |= {f"lr/{role}": rate for role, rate in run.optimizer.learning_rates(step.factor).items()}
        if step.updated:
            values |= {f"update_rms/{role}": rms for role, rms in on_host(run.optimizer.update_rms()).items()}
            values |= seconds_by_rank(run.optimizer.seconds(), run.place)
        biases = {name: run.model.layers[int(name.split(".")[1])].ffn.bias_E.norm() for name in step.counts}
        for name, bias_norm in on_host(biases).items():
            prefix = f"moe/{name.split('.')[1]}"
            values |= {f"{prefix}/{key}": value for key, value in load_statistics(step.counts[name]).items()}
            values[f"{prefix}/bias_norm"] = bias_norm
        return values

    def _speed(self) -> dict[str, float | None]:
        run, now = self.run, time.perf_counter()
        seconds, steps = now - self._since, run.progress.step - self._first_step
        tokens = steps * run.job.training.tokens_per_step
        speed = throughput(tokens, seconds, run.place.ranks, self.flops, self.peak)
        share = 100 * self._data_seconds / seconds
        data = self._data_seconds / steps
        self._since, self._first_step, self._data_seconds = now, run.progress.step, 0.0
        return {**asdict(speed), "time/step": seconds / steps, "time/data": data, "time/data_share": share}


def on_host(values: dict[str, Tensor]) -> dict[str, float]:
    """Numbers from the device with one wait for all of them."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}


def seconds_by_rank(seconds: dict[str, float], place: Place) -> dict[str, float]:
    """`time/<name>/<rank>`, the same on every rank. Collective."""
    own = torch.eye(place.ranks)[place.rank]
    everywhere = reduce_scalars({name: s * own for name, s in seconds.items()}, device=place.device)
    return {f"time/{name}/{rank}": s for name, by_rank in everywhere.items() for rank, s in enumerate(by_rank)}


def log_validation(run: Run, log: MetricLog) -> None:
    values = validate(run.model, run.held_out, run.place) | validate_at(run.model, run.held_out_at, run.place)
    run.progress.validation = values
    log.log(run.progress.step, values)
    dtype = getattr(torch, run.job.training.dtype)
    for prompt in run.job.validation.prompts:
        text = continue_prompt(run.model, run.tokenizer, prompt, run.place, dtype)
        log.text(run.progress.step, f"samples/{prompt}", text)


# Checkpoints ----------------------------------------------------------------------------------------


def save(run: Run) -> None:
    """A checkpoint of this step; the best so far if it was just validated and no saved one had a lower loss."""
    progress = run.progress
    validated = run.held_out and due(progress.step, run.job.validation.freq, run.job.training.steps)
    loss = progress.validation["validation/loss"] if validated else math.nan
    best = loss < (math.inf if progress.best_loss is None else progress.best_loss)  # False for nan
    progress.best_loss = loss if best else progress.best_loss
    values = {
        "format": FORMAT,
        "progress": asdict(progress),
        "data": {"seed": run.job.data.seed, "index": progress.step * run.job.training.global_batch_size},
        "optimizer_steps": run.optimizer.steps,
        "recipe": to_table(run.job),
        "tokenizer": run.tokenizer.hash,
        "random_states": random_states(run.checkpoints.group),
    }
    run.checkpoints.save(progress.step, tensors(run), values, best=best)


def tensors(run: Run) -> dict:
    return {**model_state(run.model), **optimizer_state(run.optimizer.state_views())}


def restore(run: Run) -> None:
    """Go on where the newest checkpoint (or the one the recipe names) stands; else start from given weights, if any.

    Raises CheckpointError where the recipe or the tokenizer is not the checkpoint's.
    """
    asked = run.job.checkpoint.load_step
    step = None
    if run.checkpoints:
        step = run.checkpoints.latest() if asked == -1 else asked
    if step is None:
        load_weights(run)
        return
    values = run.checkpoints.values(step)
    refuse_another_run(run, step, values)
    run.checkpoints.load(step, tensors(run))
    run.optimizer.steps = values["optimizer_steps"]
    restore_random_states(values["random_states"])
    run.progress = Progress(**values["progress"])


def refuse_another_run(run: Run, step: int, values: dict) -> None:
    """A resumed run must mean what it meant before."""
    where = f"checkpoint {step} in {run.checkpoints.root}"
    refuse_another_tokenizer(run, where, values)
    changed = refused_changes(values["recipe"], to_table(run.job))
    if changed and not run.job.checkpoint.allow_changes:
        raise CheckpointError(
            f"{where} is of another recipe: {'; '.join(changed)}. Change them back, give the run a dump_folder of its "
            "own, or insist with --checkpoint.allow_changes"
        )


def refuse_another_tokenizer(run: Run, where: str, values: dict) -> None:
    """Weights mean nothing under other token ids, even where the shapes agree."""
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{where} has format {values.get('format')}, this version reads {FORMAT}")
    if values["tokenizer"] != run.tokenizer.hash:
        raise CheckpointError(f"{where} was trained with another tokenizer; use the one it names in its recipe")


def load_weights(run: Run) -> None:
    """Start from the weights of another run's checkpoint ([checkpoint] initial_load_path), if the recipe names one."""
    section = run.job.checkpoint
    if section.initial_load_path is None:
        return
    folder, step = locate(Path(section.initial_load_path))
    source = Checkpointer(folder)
    step = source.latest() if step is None else step
    if step is None:
        raise CheckpointError(f"no checkpoint in {folder} ([checkpoint] initial_load_path)")
    refuse_another_tokenizer(run, f"checkpoint {step} in {folder}", source.values(step))
    source.load(step, model_state(run.model), strict=not section.initial_load_partial, ignore=("optimizer.",))


if __name__ == "__main__":
    main(sys.argv[1:])
