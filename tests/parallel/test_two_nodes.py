"""Two network namespaces of one machine as two nodes, joined by torchrun's rendezvous. Needs root and iproute2."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import ENVIRONMENT, REPOSITORY

NODES = {"hymo_node0": "10.77.0.1", "hymo_node1": "10.77.0.2"}  # namespaces, and the addresses of their ends of a cable
SHORT = {
    "training.steps": 2,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
    "checkpoint.enable": "false",
    "validation.enable": "false",
    "data.workers": 0,
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_nodes() -> Iterator[None]:
    """Two namespaces that see nothing but themselves and each other."""
    try:
        for node in NODES:
            ip("netns", "add", node)
        first, second = NODES
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for node, address in NODES.items():
            ip("-n", node, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", node, "link", "set", "cable", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True)


def pretrain(folder: Path, **more: int) -> list[str]:
    flags = {"job.dump_folder": folder, **SHORT, **{f"parallelism.{key}": value for key, value in more.items()}}
    recipe = ["-m", "recipes.pretrain", "--job.config_file", "train_configs/hymo_debug.toml"]
    return recipe + [f"--{key}={value}" for key, value in flags.items()]


def start(node: str, program: list[str]) -> subprocess.Popen:
    """torchrun with two ranks on `node`; the first node keeps the store at which all meet."""
    head, here = next(iter(NODES.values())), NODES[node]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    torchrun += ["--rdzv_id=two_nodes", f"--rdzv_endpoint={head}:29400", f"--local_addr={here}"]
    torchrun += [f"--rdzv_conf=is_host={int(here == head)}"]  # by itself it compares host names, and here is one host
    return subprocess.Popen(
        ["ip", "netns", "exec", node, sys.executable, *torchrun, *program],
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "cable"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


@pytest.mark.heavy
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_two_nodes_train_as_one_process_does(tmp_path):
    """Four ranks, a copy of the weights on each node."""
    alone = [sys.executable, *pretrain(tmp_path / "one")]
    subprocess.run(alone, cwd=REPOSITORY, env=os.environ | ENVIRONMENT, check=True, capture_output=True)
    with two_nodes():
        copies = pretrain(tmp_path / "two", data_parallel_replicate_degree=2)
        processes = [start(node, copies) for node in NODES]
        output = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
