"""One, two and four ranks compute the same, under every plan. The sentences are the functions of `rank_cases`."""

import pytest

from tests.ranks import sentences, verdicts

CASES = "tests.parallel.rank_cases"
HEAVY_CASES = "tests.parallel.heavy_cases"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return {ranks: verdicts(ranks, CASES, folder) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sentence", sentences(CASES))
def test_on_ranks(sentence, ranks, found):
    assert not found[ranks][sentence], found[ranks][sentence]


@pytest.mark.heavy
def test_on_ranks_with_generated_code(tmp_path):
    for ranks in (1, 2):
        for sentence, raised in verdicts(ranks, HEAVY_CASES, tmp_path).items():
            assert not raised, f"{sentence} on {ranks} ranks: {raised}"
