"""The sentences are the functions of `family_cases`, on one rank."""

import pytest

from tests.ranks import sentences, verdicts

CASES = "tests.recipes.family_cases"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return verdicts(1, CASES, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("sentence", sentences(CASES))
def test_debug_recipe(sentence, found):
    assert not found[sentence], found[sentence]
