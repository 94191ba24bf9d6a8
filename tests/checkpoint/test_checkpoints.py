"""Checkpoints on 1, 2 and 4 ranks. The sentences are the functions of the `*_cases` modules; each fails on its own."""

import pytest

from tests.ranks import on_ranks, sentences, verdicts

FOLDER, SAVING, LOADING = (f"tests.checkpoint.{name}_cases" for name in ("folder", "saving", "loading"))


@pytest.fixture(scope="module")
def of_saving(folder):
    return verdicts(4, SAVING, folder)


@pytest.fixture(scope="module")
def of_loading(folder, of_saving):
    return {ranks: verdicts(ranks, LOADING, folder) for ranks in (1, 2)}


@on_ranks(FOLDER, 1)
def test_a_folder_of_checkpoints(raised):
    assert not raised, raised


@pytest.mark.parametrize("sentence", sentences(SAVING))
def test_saved_on_four_ranks(sentence, of_saving):
    assert not of_saving[sentence], of_saving[sentence]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sentence", sentences(LOADING))
def test_saved_on_four_ranks_loaded_on_fewer(sentence, ranks, of_loading):
    assert not of_loading[ranks][sentence], of_loading[ranks][sentence]
