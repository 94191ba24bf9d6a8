"""What two ranks make of each other's numbers and signals."""

import os
import signal

import torch
import torch.distributed as dist

from components.checkpoint.signals import StopRequest
from components.metrics.reduce import reduce_scalars

CPU = torch.device("cpu")


def test_sums_add_up_and_replicated_values_arrive_unchanged():
    rank = dist.get_rank()
    sums = {"loss": torch.tensor(1.5 + rank), "tokens": 2**40 + rank, "load": torch.tensor([1, 2 * rank])}
    reduced = reduce_scalars(sums, {"grad_norm": torch.tensor(0.25), "lr": 0.1}, device=CPU)
    assert reduced == {"loss": 4.0, "tokens": 2**41 + 1, "load": [2.0, 2.0], "grad_norm": 0.25, "lr": 0.1}


def test_a_replicated_infinity_stays_one():
    reduced = reduce_scalars({}, {"grad_norm": torch.tensor(float("inf"))}, device=CPU)
    assert reduced == {"grad_norm": float("inf")}


def test_there_is_one_collective_for_all_numbers():
    calls, original = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **options: (calls.append(len(tensor)), original(tensor, **options))
    reduce_scalars({str(n): torch.ones(n) for n in range(1, 5)}, {"x": 1.0}, device=CPU)
    dist.all_reduce = original
    assert calls == [11]


def test_nothing_to_reduce_is_no_collective():
    assert reduce_scalars({}, device=CPU) == {}


def test_a_signal_to_one_rank_stops_all():
    stop = StopRequest()
    assert not stop.agreed()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed()
    assert stop.flag == dist.get_rank()
    stop.close()
