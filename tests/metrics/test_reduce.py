"""The one reduction of a logged step, on two ranks. The sentences are the functions of reducing_cases.py."""

from tests.ranks import on_ranks


@on_ranks("tests.metrics.reducing_cases", 2)
def test_on_two_ranks(raised):
    assert not raised, raised
