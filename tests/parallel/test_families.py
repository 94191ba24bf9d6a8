"""The sentences are the functions of `family_cases`, on one, two and four ranks."""

import pytest

from tests.ranks import sentences, verdicts

CASES = "tests.parallel.family_cases"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {ranks: verdicts(ranks, CASES, folder) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sentence", sentences(CASES))
def test_on_ranks(sentence, ranks, found):
    assert not found[ranks][sentence], found[ranks][sentence]
