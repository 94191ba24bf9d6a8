"""Markers: `heavy` tests run with --heavy, `gpu` tests where there is a CUDA device."""

import os

os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

import pytest
import torch

import registry


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
