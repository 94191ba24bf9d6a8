"""Kernels keep to their own memory, whatever the order of programs and lanes. Watched in the interpreter, at widths and
lengths that fill no tile. Left out: `momentum` and `decayed_update`, which are given addresses in place of tensors."""

import dataclasses
import os

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from components.kernels.accumulate import op as accumulate
from components.kernels.even_rows import op as even_rows
from components.kernels.gated_delta_rule.forms import EXACT
from components.kernels.gated_delta_rule.launch_small import SmallHeads
from components.kernels.gated_delta_rule.launch_wide import WideHeads
from components.kernels.gated_norm import launch as gated_norm
from components.kernels.grouped_gemm import launch as grouped_gemm
from components.kernels.linear_cross_entropy import launch as linear_cross_entropy
from components.kernels.newton_schulz import launch as newton_schulz
from components.kernels.rotation import op as rotation
from components.kernels.router_product import op as router_product
from components.kernels.short_conv import launch as short_conv
from components.kernels.swiglu import op as swiglu
from tests.kernels import test_gated_delta_rule_triton as gated_delta_rule
from tests.kernels import test_rotation
from tests.kernels.watched import watched

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="needs Triton's interpreter")
STARTS = [0, 1, 1, 18, 34, 68, 68]  # two rows of 34


@triton.jit
def shift(x, y, N, BY: tl.constexpr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = x[i + BY], with y stored, read back and stored again."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i + BY, mask=i < N), mask=i < N)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y + i, tl.load(y + i, mask=i < N), mask=i < N)


def run_shift(x: Tensor, y: Tensor, by: int = 0, barrier: bool = True) -> None:
    with watched():
        shift[(triton.cdiv(len(y), 4),)](x, y, len(y), BY=by, BARRIER=barrier, BLOCK=4)


def test_a_watched_kernel_does_what_it_does_unwatched():
    x, y = torch.arange(5.0), torch.zeros(10)
    run_shift(x, y[2:7])
    assert y.tolist() == [0, 0, 0, 1, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: run_shift(torch.ones(5), torch.ones(5), by=1), "reads outside its tensors"),
        (lambda: run_shift(torch.ones(5), torch.ones(5), by=-1), "reads outside its tensors"),
        (lambda: run_shift(torch.ones(9)[::2], torch.ones(5)), "reads outside its tensors"),
        (lambda: run_shift(torch.ones(5), torch.ones(9)[::2]), "writes outside its tensors"),
        (lambda: run_shift(torch.ones(5), torch.ones(5), barrier=False), "reads back what it wrote without a barrier"),
    ],
)
def test_the_watch_sees(call, sentence):
    with pytest.raises(Exception, match=sentence):
        call()


@triton.jit
def rotate(x, N, BLOCK: tl.constexpr):
    """x[i] = x[i + BLOCK], or x[0] past N."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + (i + BLOCK) % N))


@triton.jit
def fill(x):
    tl.store(x, 2.0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: rotate[(2,)](x, 8, BLOCK=4), "reads what another one writes"),
        (lambda x: rotate[(2,)](x, 12, BLOCK=4), "writes what another one reads"),
        (lambda x: fill[(2,)](x), "two programs write the same"),
    ],
)
def test_the_watch_sees_programs_that_depend_on_each_others_order(call, sentence):
    with pytest.raises(Exception, match=sentence), watched():
        call(torch.ones(12))


@triton.jit
def turn(x, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    backwards = tl.load(x + BLOCK - 1 - i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + i, backwards)


def test_the_watch_sees_lanes_that_write_what_others_may_not_have_read_yet():
    with watched():
        turn[(1,)](x := torch.arange(4.0), BARRIER=True, BLOCK=4)
    assert x.tolist() == [3, 2, 1, 0]
    with pytest.raises(Exception, match="a lane writes what another one read"), watched():
        turn[(1,)](x, BARRIER=False, BLOCK=4)


SMALL, WIDE = gated_delta_rule.SMALL, gated_delta_rule.WIDE
RULES = {
    "small": (dict(B=2, T=35, G=1, H=2, K=12, V=20), SMALL),
    "small, one token": (dict(B=1, T=1, G=1, H=1, K=16, V=16), SmallHeads()),
    "small, whole segments": (dict(B=1, T=64, G=1, H=1, K=32, V=32, initial=False), SMALL),
    "small, chunks of 32": (dict(B=1, T=75, G=1, H=1, K=16, V=20), dataclasses.replace(SMALL, chunk=32)),
    "small, packed": (dict(B=2, T=34, G=1, H=1, K=16, V=16, starts=STARTS), SMALL),
    "wide": (dict(B=2, T=19, G=1, H=2, K=12, V=20), WIDE),
    "wide, one token": (dict(B=1, T=1, G=1, H=1, K=16, V=48, initial=False), WideHeads()),
    "wide, exact": (dict(B=1, T=65, G=1, H=1, K=36, V=60), EXACT),
    "wide, packed": (dict(B=2, T=34, G=1, H=1, K=20, V=36, starts=STARTS), WIDE),
}


@pytest.mark.parametrize("case", RULES)
def test_the_gated_delta_rule_keeps_to_its_memory(case):
    sizes, config = RULES[case]
    x = gated_delta_rule.inputs(**sizes)
    with watched():
        gated_delta_rule.run(x, *gated_delta_rule.upstream(x), config)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("beside", [0, 20])
@pytest.mark.parametrize("uses", [1, 4])
def test_the_short_convolution_keeps_to_its_memory(monkeypatch, packed, beside, uses):
    monkeypatch.setattr(short_conv, "TOKENS", 8)
    monkeypatch.setattr(short_conv, "TOKENS_OF_SEVERAL", 8)
    monkeypatch.setattr(short_conv, "CHANNELS", 16)
    x, w, d_rest = torch.randn(2, 9, 40)[..., : 20 + beside], torch.randn(20, 3), torch.randn(2, 9, 40)[..., :beside]
    starts = torch.tensor([0, 1, 1, 5, 9, 18, 18], dtype=torch.int32) if packed else None
    with watched():
        y = short_conv.forward(x[..., :20], w, starts, True)
        short_conv.backward([y.clone() for _ in range(uses)], d_rest, x, w, starts, True)


@pytest.mark.parametrize("sizes", [(37,), (5, 0, 17, 1, 14), (0, 130, 0), (0, 0)])
def test_the_grouped_products_keep_to_their_memory(sizes):
    M, P, Q = sum(sizes), 21, 70
    rows, weight, dy = torch.randn(M, P), torch.randn(len(sizes), P, Q), torch.randn(M, Q)
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    with watched():
        grouped_gemm.product(rows, weight, ends)
        grouped_gemm.product(dy, weight.mT, ends)
        grouped_gemm.weight_gradient(rows, dy, ends)


@pytest.mark.parametrize("shape", [(1, 2), (9, 514)])
def test_swiglu_keeps_to_its_memory(shape):
    gate_up = torch.randn(shape)
    with watched():
        swiglu.launch_backward(swiglu.launch_forward(gate_up), gate_up)


@pytest.mark.parametrize("sizes", [(5, 24, 4), (70, 136, 17), (600, 40, 65)])
def test_the_routers_product_keeps_to_its_memory(sizes):
    N, D, E = sizes
    x, weight, dy = torch.randn(N, D), torch.randn(E, D), torch.randn(N, E)
    with watched():
        router_product.launch_product(x, weight)
        router_product.launch_input_gradient(dy, weight, x.dtype)
        router_product.launch_weight_gradient(dy, x)


@pytest.mark.parametrize(("skip", "weight"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_gated_norm_keeps_to_its_memory(monkeypatch, skip, weight):
    monkeypatch.setattr(gated_norm, "BACKWARD_PROGRAMS", 3)
    monkeypatch.setattr(gated_norm, "FORWARD_TILE", 128)
    monkeypatch.setattr(gated_norm, "BACKWARD_TILE", 128)
    o, joint = torch.randn(2, 7, 6, 12), torch.randn(2, 7, 3 * 72)
    v, D = (joint[..., :72].unflatten(-1, (6, 12)), torch.randn(6)) if skip else (None, None)
    inputs = o, v, D, torch.randn(12) if weight else None, joint[..., 144:]
    with watched():
        y = gated_norm.forward(*inputs, 1e-6)
        gated_norm.backward(y, *inputs, 1e-6)


@pytest.mark.parametrize("case", test_rotation.SIZES)
def test_the_gradient_of_a_joint_projection_keeps_to_its_memory(case):
    with watched():
        rotation.launch(*test_rotation.gradients(case, torch.float32))


@pytest.mark.parametrize("softcap", [0.0, 15.0, 60.0])
def test_the_loss_keeps_to_its_memory(monkeypatch, softcap):
    monkeypatch.setattr(linear_cross_entropy, "BLOCK", 64)
    z, target = torch.randn(4, 131), torch.tensor([0, 130, -100, 7])
    with watched():
        _, dz = linear_cross_entropy.loss_and_gradient_(z, target, softcap, True)
        linear_cross_entropy.scaled(dz, torch.tensor(2.0), torch.float32)


def test_sums_keep_to_their_memory():
    with watched():
        accumulate.launch(torch.randn(4099), torch.randn(4099))


def test_factors_of_rows_keep_to_their_memory():
    with watched():
        even_rows.launch(torch.rand(3, 21), torch.rand(3, 21), 7, 0.9, 1.0)


@pytest.mark.parametrize(("R", "K"), [(16, 32), (37, 21)])
def test_newton_schulz_keeps_to_its_memory(monkeypatch, R, K):
    monkeypatch.setattr(newton_schulz, "HIGH", 16)
    monkeypatch.setattr(newton_schulz, "COLUMNS", 16)
    monkeypatch.setattr(newton_schulz, "SCALED", (16, 16))
    x, added = torch.randn(2, R, K), torch.randn(2, R, R)
    with watched():
        newton_schulz.symmetric_product(x, added + added.mT, 0.5, 2.0, 1.0, torch.rand(2, 1, 1))
        newton_schulz.scale(x, torch.rand(2, R, 1), torch.empty_like(x))
        newton_schulz.scale(x, torch.rand(2, 1, K), x)
