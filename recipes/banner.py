"""What a run says before its first step and after its last: the stack, who trains what, what a step costs; then where
everything is."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from components.models.stacked_lm import StackedLM
from recipes.job.flags import without

if TYPE_CHECKING:
    from recipes.pretrain import Run

STEPS_FLAG = "--training.steps"


def banner(run: "Run") -> None:
    """The stack, the parameters by role with their optimizers, FLOPs and tokens; to stdout."""
    console = Console(width=110, highlight=False)
    training, place, config = run.job.training, run.place, run.model.config
    console.print(f"[bold]{run.job.job.config_file}[/bold]  {run.job.job.description}", markup=True)
    console.print(stack_table(config))
    console.print(role_table(run))
    flops = config.flops_per_token(training.seq_len)
    terms = " + ".join(f"{name} {value / 1e9:.4g}" for name, value in flops.items())
    print(f"training FLOPs a token: {sum(flops.values()) / 1e9:.4g} G ({terms})")
    rank_batch = training.global_batch_size // (training.local_batch_size * place.ranks)
    print(
        f"tokens a step: {training.tokens_per_step:,} = {place.ranks} ranks x {rank_batch} micro-batches x "
        f"{training.local_batch_size} sequences x {training.seq_len}; {training.steps:,} steps, "
        f"{training.steps * training.tokens_per_step / 1e6:,.4g} M tokens; {place.device.type}, {training.dtype}"
    )
    for role, load in run.optimizer.load_reports().items():
        print(f"{role}: busiest rank {load.max_over_mean:.3f} x the mean ({load.distribution})")
    if run.held_out:
        print(f"held-out unigram entropy: {run.held_out.unigram_entropy():.4f} nats a token")
    if run.progress.step:
        print(f"resumed after step {run.progress.step}, {run.progress.tokens:,} tokens")


def stack_table(config: StackedLM.Config) -> Table:
    """Runs of equal blocks with their parameters."""
    table = Table(title="stack", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("steps", "left"), ("zone", "left"), ("mixer", "left"), ("ffn", "left")):
        table.add_column(name, justify=justify)
    table.add_column("parameters a layer", justify="right")
    table.add_column("active", justify="right")
    counts = config.parameter_table()
    for first, last, step in _runs(config):
        labels = config.blocks[step.block]
        names = [config.mixers[labels.mixer].name, config.ffns[labels.ffn].name if labels.ffn in config.ffns else "-"]
        parts = [v for k, v in counts.items() if k.startswith(f"layers.{step.layer}.")]
        span = str(first) if first == last else f"{first}-{last}"
        table.add_row(span, step.zone, *names, *(f"{sum(p) / 1e6:,.2f} M" for p in zip(*parts, strict=True)))
    return table


def role_table(run: "Run") -> Table:
    table = Table(title="parameters by role", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("role", "left"), ("optimizer", "left"), ("peak rate", "right"), ("tensors", "right")):
        table.add_column(name, justify=justify)
    table.add_column("parameters", justify="right")
    for row in run.optimizer.role_table():
        rate = f"{row.learning_rate:g}"
        table.add_row(row.role, row.optimizer, rate, f"{row.tensors:,}", f"{row.parameters:,}")
    counts = run.model.config.parameter_table().values()
    stored, active = (sum(part) for part in zip(*counts, strict=True))
    table.add_row("all", "", "", "", f"{stored:,}")
    table.add_row("active for a token", "", "", "", f"{active:,}")
    return table


def farewell(run: "Run") -> None:
    """The last lines: held-out loss beside the unigram entropy, where things are, how to go on."""
    folder, progress, last = run.job.job.dump_folder, run.progress, run.job.training.steps
    if run.held_out and progress.validation:
        loss = progress.validation["validation/loss"]
        print(f"held-out loss {loss:.4f} nats a token; held-out unigram entropy {run.held_out.unigram_entropy():.4f}")
    done = progress.step >= last
    print(f"{'done' if done else 'stopped'} after step {progress.step} of {last}")
    watch = f", tensorboard --logdir {folder}/tb" if run.job.metrics.enable_tensorboard else ""
    print(f"logs: {folder}/metrics.jsonl{watch}")
    if run.checkpoints:
        print(f"checkpoints: {run.checkpoints.root}")
        arguments = with_steps(sys.argv[1:], 2 * progress.step) if done else sys.argv[1:]
        print(f"{'train longer' if done else 'resume'}: {_command(run, arguments)}")
    else:
        print(f"no checkpoints were asked for ([checkpoint] enable); recipe: {os.path.join(folder, 'recipe.toml')}")


def _command(run: "Run", arguments: Sequence[str]) -> str:
    """What starts this run again, on as many ranks."""
    ranks = run.place.ranks
    launcher = "python" if ranks == 1 else f"torchrun --nproc_per_node={ranks}"
    return shlex.join([*launcher.split(), "-m", "recipes.pretrain", *arguments])


def with_steps(arguments: Sequence[str], steps: int) -> list[str]:
    """The arguments with another number of steps."""
    return [*without(arguments, STEPS_FLAG), STEPS_FLAG, str(steps)]


def _runs(config: StackedLM.Config):
    """(first step, last step, its step) of neighbouring steps with the same block and zone."""
    steps = config.steps()
    first = 0
    for i, step in enumerate(steps):
        following = steps[i + 1] if i + 1 < len(steps) else None
        if following is None or (following.block, following.zone) != (step.block, step.zone):
            yield first, i, step
            first = i + 1
