"""The sentences are the functions of `family_cases`, on one, two and four ranks."""

from tests.ranks import on_ranks


@on_ranks("tests.parallel.family_cases", 1, 2, 4)
def test_on_ranks(raised):
    assert not raised, raised
