"""HyMo's gated delta rule mixer: what writes its gradients side by side changes none of them."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from components.interfaces import Context
from components.kernels.rotation import turn
from components.kernels.short_conv.reference import short_conv_reference
from components.mixers import hymo_gdn
from components.parameters import initialise
from registry import parse_component
from tests.contracts.parts import context

DIM, ROWS, LENGTH = 12, 2, 21
TABLES = {
    "keys and queries rotate": {},
    "all of them": {"rotary_fraction": 1.0},
    "values rotate": {"rope_on": "v"},
    "nothing rotates": {"rope": False},
    "no skip": {"skip": False},
}


def plain_convolve(x_BTX, w_CW, ctx, _, uses):
    x_BTC, rest_BTS = x_BTX[..., : len(w_CW)], x_BTX[..., len(w_CW) :]
    return *(short_conv_reference(x_BTC, w_CW, position_BT=ctx.position_BT),) * uses, rest_BTS, None


def plain_split(x, sizes, angles=None, head_dim=0):
    first, second, third = x.split(sizes, -1)
    if angles is None:
        return first, second, third
    heads = (x.unflatten(-1, (-1, head_dim)) for x in (first, second))
    return *(turn(x, *angles).flatten(2) for x in heads), third


def built(table: str):
    options = {"inner": 24, "head_dim": 8, "state_dim": 12, "rotary_fraction": 0.5} | TABLES[table]
    mixer = parse_component("mixer", {"name": "hymo_gdn"} | options).build(dim=DIM, layer=0, branches=4)
    initialise(mixer, seed=0)
    return mixer


def outputs_and_gradients(mixer, forward, ctx, x, dy):
    y, _ = forward(x, ctx)
    return y, *torch.autograd.grad(y, (x, *mixer.parameters()), dy)


def plainly(monkeypatch) -> None:
    """From here on the mixer takes its projections apart as autograd does."""
    monkeypatch.setattr(hymo_gdn, "convolve", plain_convolve)
    monkeypatch.setattr(hymo_gdn, "split_last", plain_split)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_all_gradients_are_those_of_plain_torch(table, compiled, packed, monkeypatch):
    torch._dynamo.reset()  # or what differs between two tables becomes a variable
    mixer = built(table).double()
    ctx = context(ROWS, LENGTH, torch.arange(LENGTH).expand(ROWS, LENGTH) // 8 if packed else None)
    x = torch.randn(ROWS, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    forward = torch.compile(mixer, backend="aot_eager", fullgraph=True) if compiled else mixer
    found = outputs_and_gradients(mixer, forward, ctx, x, dy)
    plainly(monkeypatch)
    for one, other in zip(found, outputs_and_gradients(mixer, mixer, ctx, x, dy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_it_begins_with_a_whole_skip_of_the_values_and_taps_drawn_within_one_over_the_root_of_their_number():
    table = {"name": "hymo_gdn", "inner": 64, "head_dim": 8, "state_dim": 8}
    mixer = parse_component("mixer", table).build(dim=DIM, layer=0, branches=4)
    initialise(mixer, 0)
    assert torch.equal(mixer.recurrence.D, torch.ones_like(mixer.recurrence.D))
    assert 0.4 < mixer.conv.abs().max() <= 0.5 and abs(mixer.conv.mean()) < 0.1


def test_no_kernel_adds_up_the_gradients_of_the_convolved_stream():
    torch._dynamo.reset()
    targets = []

    def keep(graph_module, _):
        targets.extend(node.target for node in graph_module.graph.nodes)
        return make_boxed_func(graph_module.forward)

    mixer, ctx = built("keys and queries rotate"), context(ROWS, LENGTH, None)
    backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=keep)
    y, _ = torch.compile(mixer, backend=backend, fullgraph=True)(torch.randn(ROWS, LENGTH, DIM), ctx)
    y.sum().backward()
    assert torch.ops.hymo.short_conv_backward.default in targets
    assert torch.ops.aten.add.Tensor not in targets


@pytest.mark.gpu
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_and_all_gradients_are_those_of_plain_torch_in_bf16_on_the_gpu(table, compiled, monkeypatch):
    torch._dynamo.reset()
    mixer = built(table).cuda().bfloat16()
    mixer.recurrence.float()
    ctx = Context(torch.arange(LENGTH, device="cuda").expand(ROWS, LENGTH))
    x = torch.randn(ROWS, LENGTH, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)
    forward = torch.compile(mixer, fullgraph=True) if compiled else mixer
    found = outputs_and_gradients(mixer, forward, ctx, x, dy)
    plainly(monkeypatch)
    for one, other in zip(found, outputs_and_gradients(mixer, mixer, ctx, x, dy), strict=True):
        # a compiler rounds to bf16 elsewhere, which a sum over all tokens such as the gradient of D sees
        assert (one - other).norm() <= (0.1 if compiled else 0.01) * other.norm()
