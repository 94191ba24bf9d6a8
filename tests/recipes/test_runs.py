"""Whole runs of the tiny recipe on several ranks. The sentences are the functions of the case modules."""

from tests.ranks import on_ranks


@on_ranks("tests.recipes.number_cases", 4, 2, 1)
def test_on_ranks(raised):
    assert not raised, raised


@on_ranks("tests.recipes.recovery_cases", 2)
def test_two_ranks(raised):
    assert not raised, raised
