"""What a run will need, from its recipe alone: `python -m recipes.plan --job.config_file …`."""
