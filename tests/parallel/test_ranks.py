"""One, two and four ranks compute the same, under every plan. The sentences are the functions of `rank_cases`."""

import pytest

from tests.ranks import on_ranks


@on_ranks("tests.parallel.rank_cases", 1, 2, 4)
def test_on_ranks(raised):
    assert not raised, raised


@pytest.mark.heavy
@on_ranks("tests.parallel.heavy_cases", 1, 2)
def test_on_ranks_with_generated_code(raised):
    assert not raised, raised
