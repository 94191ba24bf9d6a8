"""Runs of the tiny recipe, and what can be compared of them."""

import json
import shutil
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from components.checkpoint.signals import StopRequest
from components.parallel.process_group import Place
from recipes import pretrain
from recipes.job import Job, load
from tests.ranks import REPOSITORY

TINY = REPOSITORY / "tests" / "recipes" / "tiny.toml"
CLOCKS = ("tps", "tflops", "mfu", "time/", "memory/")  # keys of metrics.jsonl that no two runs share

State = dict[str, torch.Tensor]
Lines = list[dict[str, float]]


def arguments(folder: Path, *flags: str) -> list[str]:
    return ["--job.config_file", str(TINY), "--job.dump_folder", str(folder), *flags]


def job(folder: Path, *flags: str) -> Job:
    return load(arguments(folder, *flags), ranks=dist.get_world_size())


def place() -> Place:
    return Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def trained(folder: Path, *flags: str) -> pretrain.Run:
    """A run in `folder`, from what is there to its end, in this process."""
    with closing(StopRequest()) as stop:
        run = pretrain.train(job(folder, *flags), place(), stop)
    dist.barrier()  # rank 0 has written its last line
    return run


def restored(folder: Path, *flags: str) -> pretrain.Run:
    """The run as it stands before its first step."""
    with closing(StopRequest()) as stop:
        run = pretrain.build(job(folder, *flags), place(), stop)
    pretrain.restore(run)
    return run


def state(run: pretrain.Run) -> State:
    """Everything that a checkpoint holds, whole, on every rank: weights, buffers, optimizer state."""
    mine = [(name, view.shape, view.offset, view.local.detach()) for name, view in pretrain.tensors(run).items()]
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    whole: State = {}
    for name, shape, offset, part in (piece for pieces in everywhere for piece in pieces):
        tensor = whole.setdefault(name, torch.full(shape, torch.nan))
        tensor[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return whole


def kept(found: State, path: Path) -> State:
    """`found`, also for the launches to come."""
    if dist.get_rank() == 0:
        torch.save(found, path)
    dist.barrier()
    return found


def lines(folder: Path) -> Lines:
    """metrics.jsonl without what depends on the clock."""
    written = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(CLOCKS)} for line in written]


def continued(source: Path, target: Path, step: int) -> Path:
    """`target` as a run in `source` would have left it that died some time after it saved `step`: later lines are
    there, later checkpoints are not."""
    if dist.get_rank() == 0:
        shutil.copytree(source, target)
        for folder in (target / "checkpoint").iterdir():
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)
    dist.barrier()
    return target


def weights(found: State) -> State:
    """With the routing biases, without the optimizer's state."""
    return {name: tensor for name, tensor in found.items() if name.startswith("model.")}


def assert_same_lines(found: Lines, expected: Lines, rtol: float = 0.0) -> None:
    """The same keys in the same order; losses within `rtol`, what is made of gradients within ten times that."""
    assert [list(line) for line in found] == [list(line) for line in expected]
    for line, other in zip(found, expected, strict=True):
        for key, value in other.items():
            allowed = abs(value) * (rtol if "loss" in key else 10 * rtol)
            assert abs(line[key] - value) <= allowed, f"step {other['step']}: {key} is {line[key]}, not {value}"


def assert_same_state(found: State, expected: State, rtol: float = 0.0) -> None:
    """The same names; in relative L2 all weights together within `rtol` and all else, made of gradients, within ten
    times that. No single tensor may be off by more than a thousand times: rounding that changes who gets a token
    shows in small tensors, a fault shows as a number of the size of the tensor."""
    assert set(found) == set(expected)
    of_model = weights(expected).keys()
    for names, allowed in ((of_model, rtol), (expected.keys() - of_model, 10 * rtol)):
        if names:
            assert difference(together(found, names), together(expected, names)) <= allowed
    for name, tensor in expected.items():
        assert difference(found[name], tensor) <= 1000 * rtol, name


def together(state: State, names: Iterable[str]) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name in sorted(names)])


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)).item()
