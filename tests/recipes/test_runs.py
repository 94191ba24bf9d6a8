"""Whole runs of the tiny recipe on several ranks. The sentences are the functions of the case modules."""

import pytest

from tests.ranks import sentences, verdicts

NUMBERS, RECOVERY = "tests.recipes.number_cases", "tests.recipes.recovery_cases"


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    return {ranks: verdicts(ranks, NUMBERS, folder) for ranks in (4, 2, 1)}


@pytest.mark.parametrize("ranks", [4, 2, 1])
@pytest.mark.parametrize("sentence", sentences(NUMBERS))
def test_on_ranks(sentence, ranks, numbers):
    assert not numbers[ranks][sentence], numbers[ranks][sentence]


@pytest.fixture(scope="module")
def recovery(tmp_path_factory):
    return verdicts(2, RECOVERY, tmp_path_factory.mktemp("recovery"))


@pytest.mark.parametrize("sentence", sentences(RECOVERY))
def test_two_ranks(sentence, recovery):
    assert not recovery[sentence], recovery[sentence]
