"""What a recipe will need, before anything runs; needs no GPU.

    python -m recipes.plan --job.config_file train_configs/hymo_primary.toml --ranks 4 --gpu H100 --mfu 40 --price 2.5
    python -m recipes.plan --compare train_configs/hymo_small.toml train_configs/hymo_large.toml
    python -m recipes.plan --job.config_file … --training.seq_len 8192 --json

Every flag of the recipe works too, and applies to all recipes that are compared.
"""

import json
import sys
from dataclasses import dataclass

from rich.console import Console

from recipes.job import load_or_exit
from recipes.job.flags import split_options
from recipes.plan.estimate import Machine, estimate
from recipes.plan.show import compare, show


@dataclass(frozen=True, kw_only=True)
class Options(Machine):
    """What a recipe will need on a stated machine. Flags of the recipe, such as --training.steps, work too."""

    ranks: int = 1  # GPUs
    gpu: str = "H100"  # name of the GPU, for its stated dense bf16 peak; unknown ones give N/A
    mfu: float | None = None  # percent of that peak that the run will reach; time and cost need it, or tps
    tps: float | None = None  # tokens a second and GPU, if measured; goes before mfu
    price: float | None = None  # of one GPU for an hour
    json: bool = False  # print one JSON object (a list of them with --compare)
    compare: tuple[str, ...] = ()  # more recipes, to stand beside the first


def main(arguments: list[str]) -> None:
    options, recipe = split_options(Options, "python -m recipes.plan", arguments)
    first = [None] if any(a.startswith("--job.config_file") for a in recipe) or not options.compare else []
    plans = []
    for name in [*first, *options.compare]:
        flags = [*recipe, *(() if name is None else ("--job.config_file", name))]
        job = load_or_exit(flags, needs_data=False, ranks=options.ranks)
        plans.append(estimate(job, options))
    if options.json:
        print(json.dumps(plans if options.compare else plans[0], indent=1))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        compare(plans, console) if options.compare else show(plans[0], console)


if __name__ == "__main__":
    main(sys.argv[1:])
