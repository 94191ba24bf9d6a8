"""The sentences are the functions of `family_cases`, on one rank."""

from tests.ranks import on_ranks


@on_ranks("tests.recipes.family_cases", 1)
def test_debug_recipe(raised):
    assert not raised, raised
