"""What leaves a rank and from where, seen from one of two ranks, without the other."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from components.optimizers.bucket import Bucket, Matrix
from components.optimizers.exchange import Region
from components.parameters import OwnedParameter, normal, whole
from tests.optimizers.small_model import NORMUON, built

TOP, BOTTOM, WHOLE = Region((0, 0), (1, 3)), Region((1, 0), (1, 3)), Region((0, 0), (2, 3))


def bucket_of(holdings, owners, rank):
    """Of 2×3 matrices, each a parameter, of which `rank` stores what the holdings say."""
    role = whole("matrix", "weight", normal(1.0))
    matrices = [
        Matrix(i, OwnedParameter(f"{i}", "", nn.Parameter(torch.zeros(2, 3)), role), role.logical[0], (), held[rank])
        for i, held in enumerate(holdings)
    ]
    return Bucket([matrices], holdings, owners, rank, torch.empty(0))


@pytest.fixture
def sent(monkeypatch):
    """Copies of what was sent, and to how many ranks how much of it."""
    found = []

    def send(incoming, outgoing, splits_in, splits_out, async_op):
        found.append((outgoing.clone(), splits_out))

    monkeypatch.setattr(dist, "all_to_all_single", send)
    return found


def send_out(bucket, shapes):
    """The momenta, which were zero, after gradients of ones, twos, threes."""
    momenta = [torch.zeros(shape) for shape in shapes]
    bucket.send_out(momenta, [torch.full(shape, 1.0 + i) for i, shape in enumerate(shapes)], 0.5, False)
    return momenta


def test_momentum_leaves_in_the_order_of_owners(sent):
    bucket = bucket_of([[TOP, BOTTOM]] * 3, [(1,), (0,), (1,)], rank=1)
    momenta = send_out(bucket, [(1, 3)] * 3)
    assert [m.unique().item() for m in momenta] == [0.5, 1.0, 1.5]
    ((leaving, splits),) = sent
    assert leaving.tolist() == [1.0] * 3 + [0.5] * 3 + [1.5] * 3 and splits == [3, 6]


def test_momentum_leaves_once_for_every_owner(sent):
    bucket = bucket_of([[TOP, BOTTOM]] * 2, [(0, 1)] * 2, rank=0)
    send_out(bucket, [(1, 3)] * 2)
    ((leaving, splits),) = sent
    assert leaving.tolist() == ([0.5] * 3 + [1.0] * 3) * 2 and splits == [6, 6]


def test_a_replica_averages_also_what_another_one_sends(sent):
    bucket = bucket_of([[WHOLE, WHOLE]] * 2, [(0,), (1,)], rank=1)
    momenta = send_out(bucket, [(2, 3)] * 2)
    assert [m.unique().item() for m in momenta] == [0.5, 1.0]
    ((leaving, splits),) = sent
    assert leaving.tolist() == [1.0] * 6 and splits == [0, 6]


def test_the_update_of_every_part_comes_home_to_where_its_weight_lies(sent):
    bucket = bucket_of([[TOP, BOTTOM], [TOP, BOTTOM]], [(1,), (0,)], rank=0)
    bucket.held.copy_(torch.tensor([2.0] * 3 + [1.0] * 3))  # of the second matrix from rank 0, of the first from rank 1
    weights = [torch.zeros(1, 3), torch.zeros(1, 3)]
    bucket.apply(weights, 1.0, 0.0, False)
    assert [w.unique().item() for w in weights] == [-1.0, -2.0]


@pytest.mark.parametrize("full, buckets", [(2**24, 1), (80, 2), (1, 4)])
def test_small_batches_share_a_bucket_until_it_is_full(monkeypatch, full, buckets):
    monkeypatch.setattr("components.optimizers.bucket.BUCKET_ELEMENTS", full)
    _, optimizer = built(matrix=NORMUON)
    matrix = optimizer.groups["matrix"].optimizer
    assert len(matrix.buckets) == buckets
    assert sorted(batch.shape for batch in matrix.batches) == [(1, 7), (5, 7), (6, 7), (7, 6)]
