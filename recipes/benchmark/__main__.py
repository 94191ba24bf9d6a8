"""Measure, but only what has been found right.

python -m recipes.benchmark kernels --json-file kernels.json
"""

import tyro

from recipes.benchmark.kernels import kernels


def main() -> None:
    app = tyro.extras.SubcommandApp()
    app.command(name="kernels")(kernels)
    app.cli(prog="recipes.benchmark")


if __name__ == "__main__":
    main()
