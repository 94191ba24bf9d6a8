"""Markers: `heavy` tests run with --heavy, `gpu` tests where there is a CUDA device. Fixtures: launches on ranks."""

import os
from functools import cache

os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

import pytest
import torch

import registry
from tests.ranks import verdicts


def pytest_addoption(parser):
    parser.addoption("--heavy", action="store_true", help="run production-size and slow tests too")


def pytest_collection_modifyitems(config, items):
    skip_heavy = pytest.mark.skip(reason="production-size: run with --heavy")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "heavy" in item.keywords and not config.getoption("--heavy"):
            item.add_marker(skip_heavy)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)


@pytest.fixture(scope="session", autouse=True)
def discovered():
    registry.discover()


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks of a test module leave what they make."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def launched(folder):
    """`tests.ranks.verdicts` of a case module on a number of ranks, each launched once."""
    return cache(lambda cases, ranks: verdicts(ranks, cases, folder))


@pytest.fixture
def raised(request, launched):
    """What one sentence raised on one number of ranks, "" for nothing; `tests.ranks.on_ranks` says which."""
    cases, launches, ranks, sentence = request.param
    return {n: launched(cases, n) for n in launches}[ranks][sentence]
