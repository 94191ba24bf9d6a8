"""Look at what a model will see: `python -m recipes.inspect_data --job.config_file train_configs/hymo_debug.toml`.

    --step N         the step to look at (from 0)
    --rows N         sequences of it to print
    --characters N   of each
    --plot FILE      draw the lengths of the documents of each source (needs matplotlib)

Everything else is a flag of the recipe, as for recipes.pretrain. Prints the mixture and its shares up to the step, the
step's first sequences as text (| marks where a document begins), its commonest tokens, and document lengths.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from components.data.batch import Batch
from components.data.loader import TrainData
from components.data.shards import ShardSet
from components.data.tokenizers import Tokenizer
from recipes.job import load_or_exit
from recipes.job.flags import split_options

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
COMMONEST = 20

console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Arguments:
    """Look at what a model will see."""

    step: int = 0  # the step to look at, from 0
    rows: int = 3  # sequences of it to print
    characters: int = 600  # of each
    plot: str | None = None  # draw the lengths of documents into this file


def main(arguments: list[str]) -> int:
    ours, of_recipe = split_options(Arguments, "python -m recipes.inspect_data", arguments)
    job = load_or_exit(of_recipe, ranks=1)
    tokenizer = job.tokenizer.build()
    data = TrainData(
        job.data,
        tokenizer,
        seq_len=job.training.seq_len,
        global_batch_size=job.training.global_batch_size,
        local_batch_size=job.training.local_batch_size,
    )
    batches = list(data.micro_batches(ours.step))
    console.print(mixture_table(data, ours.step))
    for index in range(ours.rows):
        print_row(data, tokenizer, ours.step * job.training.global_batch_size + index, ours.characters)
    console.print(token_table(batches, tokenizer))
    lengths = {name: document_lengths(shards) for name, shards in data.shards.items()}
    console.print(length_table(lengths))
    if ours.plot:
        plot_lengths(lengths, Path(ours.plot))
    return 0


def mixture_table(data: TrainData, step: int) -> Table:
    """Each source: how much there is, how much of it the steps up to and including `step` take."""
    sequences = (step + 1) * data.global_batch_size
    taken, passes = data.mixture.taken(sequences), data.epochs(step + 1)
    total = sum(source.weight for source in data.config.sources.values())
    columns = ("source", "tokens", "documents", "weight", "sequences so far", "share so far", "passes so far")
    table = Table(*columns, title=f"mixture after step {step}: {sequences:,} sequences")
    for name, shards in data.shards.items():
        table.add_row(
            name,
            f"{shards.tokens:,}",
            f"{sum(s.documents for s in shards.shards):,}",
            f"{data.config.sources[name].weight / total:.2%}",
            f"{taken[name]:,}",
            f"{taken[name] / sequences:.2%}",
            f"{passes[name]:.3f}",
        )
    return table


def print_row(data: TrainData, tokenizer: Tokenizer, index: int, characters: int) -> None:
    """A sequence as text, with where it comes from."""
    source, window, passed = data.where(index)
    tokens, starts = data.window(index)
    parts = [tokenizer.decode(part.tolist()) for part in np.split(tokens, starts)]
    console.rule(f"sequence {index:,}: {source}, window {window:,}, pass {passed + 1}, {len(parts)} documents")
    console.print("|".join(parts)[:characters])


def token_table(batches: list[Batch], tokenizer: Tokenizer) -> Table:
    """The commonest tokens of a step."""
    counts = Counter(np.concatenate([b.tokens_BT1[:, 1:].numpy().ravel() for b in batches]).tolist())
    share = np.array(list(counts.values())) / counts.total()
    entropy = -(share * np.log(share)).sum()
    title = f"tokens of the step: {counts.total():,}, {len(counts):,} different, unigram entropy {entropy:.3f} nats"
    table = Table("id", "token", "count", "share", title=title)
    for token, count in counts.most_common(COMMONEST):
        text = repr(tokenizer.decode([token])) if tokenizer.token_bytes[token] else "special"
        table.add_row(str(token), text, f"{count:,}", f"{count / counts.total():.2%}")
    return table


def document_lengths(shards: ShardSet) -> np.ndarray:
    """Tokens of every training document."""
    return np.concatenate([np.diff(shards.document_starts(s)) for s in shards.shards])


def length_table(lengths: dict[str, np.ndarray]) -> Table:
    table = Table("source", *(f"{q:.0%}" for q in QUANTILES), "mean", title="document lengths in tokens, by quantile")
    for name, found in lengths.items():
        table.add_row(name, *(f"{x:,.0f}" for x in np.quantile(found, QUANTILES)), f"{found.mean():,.0f}")
    return table


def plot_lengths(lengths: dict[str, np.ndarray], path: Path) -> None:
    """Histogram of document lengths, one line a source, logarithmic."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib; `pip install -e .[data]`") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="tokens of a document", ylabel="documents")
    edges = np.geomspace(min(x.min() for x in lengths.values()), max(x.max() for x in lengths.values()) + 1, 60)
    for name, found in lengths.items():
        axes.hist(found, bins=edges, histtype="step", linewidth=1.5, label=f"{name} (median {np.median(found):,.0f})")
    axes.legend()
    figure.savefig(path, dpi=120)
    console.print(f"Drawn: {path}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"{error}")
