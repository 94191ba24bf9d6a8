"""What longer text costs, of a recipe and of another beside it, on the device that is here.

    python -m recipes.benchmark length --job.config_file train_configs/hymo_primary.toml \\
        --against train_configs/hymo_attention.toml --lengths 4096 16384 65536 --figure length.png

At each length a micro-batch has as many tokens (rows = tokens / length), random ones, and runs forward and backward as
the recipe says: its plan, compiled, recorded. Beside speed and memory stands what decoding keeps of a sequence: keys
and values, or latents, which grow with every token, and states of recurrences, which do not. Every flag of the recipe
works too, for both. Left out on purpose: quality at length, which is a matter of training (`[validation] lengths`).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_leaves

from components.parallel.process_group import init, shutdown
from recipes.ablate.figures import new_figure
from recipes.benchmark import step
from recipes.benchmark.show import sequence_bytes, show_lengths
from recipes.benchmark.timing import device
from recipes.job import Job, load_or_exit
from recipes.job.flags import split_options

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What longer text costs. Flags of the recipe, such as --training.dtype, work too."""

    against: str | None = None  # another recipe, measured beside the first
    lengths: tuple[int, ...] = (4096, 16384, 65536)  # tokens a sequence
    tokens: int | None = None  # a micro-batch; if left out the recipe's, or the largest length if that is more
    micro_batches: int = 4  # timed
    json_file: Path | None = None  # also write every figure there
    figure: Path | None = None  # also draw them there (needs matplotlib)


def length(arguments: list[str]) -> None:
    options, flags = split_options(Options, "python -m recipes.benchmark length", arguments)
    flags = [*flags, *step.ALONE]
    both = [flags, *([[*flags, "--job.config_file", options.against]] if options.against else [])]
    job, *_ = (load_or_exit(mine, needs_data=False) for mine in both)
    tokens = options.tokens or max(job.training.local_batch_size * job.training.seq_len, *options.lengths)
    uneven = [n for n in options.lengths if n < 1 or tokens % n]
    if uneven:
        sys.exit(
            f"{tokens} tokens a micro-batch are no whole number of rows of {uneven[0]}; change --tokens or --lengths"
        )
    if options.figure:
        blank_or_exit()
    place = init(job.comm.init_timeout_seconds)
    benches = [step.Bench(step.Options(micro_batches=options.micro_batches), mine, place) for mine in both]
    rows = [measured(bench, n, tokens) for bench in benches for n in options.lengths]
    if place.rank == 0:
        figures = {"device": device(place.device), "ranks": place.ranks, "tokens": tokens, "rows": rows}
        show_lengths(figures, Console(width=None if sys.stdout.isatty() else 120, highlight=False))
        if options.json_file:
            options.json_file.write_text(json.dumps(figures, indent=1))
        if options.figure:
            draw(figures).savefig(options.figure, dpi=120)
    shutdown(0)


def blank_or_exit() -> Any:
    """A figure for the panels; without matplotlib the command ends before anything is measured."""
    try:
        return new_figure(13, 4)
    except ValueError as error:
        sys.exit(str(error))


def measured(bench: step.Bench, n: int, tokens: int) -> Figures:
    """Speed and memory of one recipe on sequences of `n` tokens, or why there are none; what decoding keeps of one."""
    rows = tokens // n
    sizes = ("--training.seq_len", n, "--training.local_batch_size", rows)
    flags = [str(word) for word in (*sizes, "--training.global_batch_size", rows * bench.place.ranks)]
    found = bench.attempt(flags, bench.forward_backward)
    job = bench.job(flags)
    return {
        "recipe": Path(job.job.config_file).stem,
        "length": n,
        "sequences": rows,
        "flops_per_token": bench.flops(job),
        **found,
        **kept(job, n),
    }


def kept(job: Job, n: int) -> Figures:
    """Bytes that decoding keeps of a sequence of `n` tokens in the training dtype: for each token, and whatever `n`."""
    with torch.device("meta"):
        model, dtype = job.model.build(), getattr(torch, job.training.dtype)
        none, all_of_it = (sum(t.nbytes for t in _tensors(model.new_caches(1, m, dtype))) for m in (0, n))
    return {"cache_bytes_a_token": (all_of_it - none) / n, "state_bytes": none}


def _tensors(caches: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves([vars(cache) for cache in caches]) if isinstance(leaf, torch.Tensor)]


def draw(figures: Figures) -> Any:
    """Speed, memory and what decoding keeps, along the length."""
    figure = blank_or_exit()
    panels = {
        "tok/s a GPU, forward and backward": lambda row: row.get("tps"),
        "GiB reserved": lambda row: row.get("reserved_gib"),
        "MiB that decoding keeps of a sequence": lambda row: sequence_bytes(row) / 2**20,
    }
    for number, (title, value) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number, title=title, xlabel="tokens a sequence", xscale="log")
        for recipe in dict.fromkeys(row["recipe"] for row in figures["rows"]):
            known = [(row["length"], value(row)) for row in figures["rows"] if row["recipe"] == recipe and value(row)]
            axes.plot([x for x, _ in known], [y for _, y in known], marker="o", label=recipe)
        axes.set_xticks(sorted({row["length"] for row in figures["rows"]}))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure
