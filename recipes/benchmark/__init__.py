"""Measure, but only what has been found right: `python -m recipes.benchmark kernels`, `… step`, `… length`."""
