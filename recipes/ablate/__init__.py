"""Families of recipes: run every variant over seeds on the same batches, then say what each change did."""
