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
from registry import unknown


def main(arguments: list[str]) -> None:
    match arguments:
        case ["kernels", *rest]:
            tyro.cli(kernels, prog="python -m recipes.benchmark kernels", args=rest)
        case ["step", *rest]:
            step(rest)
        case ["length", *rest]:
            length(rest)
        case [] | ["-h" | "--help", *_]:
            print(__doc__.strip())
        case [name, *_]:
            print(unknown("benchmark", name, ("kernels", "step", "length")), file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
