"""Recorded mixers on a GPU. The sentences are the functions of `recorded`."""

import json
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY, sentences

CASES = "tests.parallel.recorded"


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-m", CASES], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("sentence", sentences(CASES))
def test_on_a_gpu(sentence, found):
    assert not found[sentence], found[sentence]
