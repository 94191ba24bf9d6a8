"""The one reduction of a logged step, on two ranks. The sentences are the functions of reducing_cases.py."""

import pytest

from tests.ranks import sentences, verdicts

CASES = "tests.metrics.reducing_cases"


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    return verdicts(2, CASES, tmp_path_factory.mktemp("reduce"))


@pytest.mark.parametrize("sentence", sentences(CASES))
def test_on_two_ranks(sentence, of_two_ranks):
    assert not of_two_ranks[sentence], of_two_ranks[sentence]
