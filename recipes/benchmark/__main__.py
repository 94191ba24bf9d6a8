"""Measure, but only what has been found right.

python -m recipes.benchmark kernels --json-file kernels.json
python -m recipes.benchmark step --job.config_file train_configs/hymo_primary.toml --json-file step.json
python -m recipes.benchmark length --job.config_file train_configs/hymo_primary.toml --figure length.png
"""

import sys

import tyro

from recipes.benchmark.kernels import kernels
from recipes.benchmark.length import length
from recipes.benchmark.step import step


def main(arguments: list[str]) -> None:
    match arguments:
        case ["kernels", *rest]:
            tyro.cli(kernels, prog="recipes.benchmark kernels", args=rest)
        case ["step", *rest]:
            step(rest)
        case ["length", *rest]:
            length(rest)
        case _:
            sys.exit(__doc__.strip())


if __name__ == "__main__":
    main(sys.argv[1:])
