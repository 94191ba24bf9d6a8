"""Every claim against a plain NorMuon of one matrix, in float64 and written from the paper."""

import math

import pytest
import torch
from torch import nn

from components.kernels.newton_schulz.reference import newton_schulz_reference
from components.optimizers.roles import build_optimizers
from components.parameters import Role, normal, rows, whole
from registry import parse_component
from tests.optimizers.small_model import NORMUON, built, train

DTYPE = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Owner(nn.Module):
    """One parameter of a given role."""

    def __init__(self, value: torch.Tensor, role: Role):
        super().__init__()
        self.weight, self.role = nn.Parameter(value.clone()), role

    def roles(self):
        return {"weight": self.role}


def optimizer_of(model, **table):
    table = {"name": "normuon", "lr": 0.02, "ns_dtype": "float64"} | table
    return build_optimizers(model, {"matrix": parse_component("optimizer", table)})


def gradients(*shape, steps=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, dtype=dtype, generator=generator) for _ in range(steps)]


def run(model, grads, **table):
    optimizer = optimizer_of(model, **table)
    for gradient in grads:
        model.weight.grad = gradient.to(model.weight.dtype, copy=True)
        optimizer.step(1.0)
    return model.weight.detach()


def plain_normuon(w, grads, lr=0.02, momentum=0.95, beta2=0.95, decay=0.1, cautious=True, nesterov=False, scale=None):
    out, into = w.shape
    scale = scale or math.sqrt(max(1, out / into))
    m, v = torch.zeros_like(w), torch.zeros(out, 1, dtype=w.dtype)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        o = newton_schulz_reference(momentum * m + (1 - momentum) * g if nesterov else m)
        v = beta2 * v + (1 - beta2) * o.square().mean(1, keepdim=True)
        u = o / (v.sqrt() + 1e-10)
        u = u * (o.norm() / u.norm()) * scale
        keep = (u * w > 0).to(w.dtype) if cautious else 1.0
        w = w - lr * (u + decay * keep * w)
    return w


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"cautious": False}, {"momentum": 0.5, "beta2": 0.3}])
def test_normuon_equals_the_plain_per_matrix_reference(shape, options):
    start, grads = torch.randn(shape, dtype=torch.float64), gradients(*shape)
    moved = run(Owner(start, whole("matrix", "weight", normal(1.0))), grads, **options)
    torch.testing.assert_close(moved, plain_normuon(start, grads, **options), rtol=0, atol=1e-12)


# bf16 Newton-Schulz errs by a few per cent of an update, of which there are four at 0.02.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_lower_precision_stays_within_its_rounding_of_the_float64_yardstick(dtype, tolerance):
    start, grads = torch.randn(12, 20, dtype=torch.float64), gradients(12, 20)
    model = Owner(start.float(), whole("matrix", "weight", normal(1.0)))
    moved = run(model, grads, ns_dtype=DTYPE[dtype])
    torch.testing.assert_close(moved.double(), plain_normuon(start, grads), rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("shape", [(4, 16), (16, 4)])
def test_the_rms_scale_is_a_fifth_of_the_root_of_the_larger_side(shape):
    start, grads = torch.randn(shape, dtype=torch.float64), gradients(*shape)
    moved = run(Owner(start, whole("matrix", "weight", normal(1.0))), grads, scale="rms")
    torch.testing.assert_close(moved, plain_normuon(start, grads, scale=0.2 * 4), rtol=0, atol=1e-12)


def test_muon_is_the_scaled_orthogonal_momentum():
    start, (gradient,) = torch.randn(8, 2, dtype=torch.float64), gradients(8, 2, steps=1)
    moved = run(Owner(start, whole("matrix", "weight", normal(1.0))), [gradient], name="muon", momentum=0.9)
    torch.testing.assert_close(moved, start - 0.02 * 2 * newton_schulz_reference(gradient), rtol=0, atol=1e-12)


def test_folded_projections_are_orthogonalised_one_by_one():
    sizes = {"b": 3, "c": 5, "g": 3}
    start, grads = torch.randn(11, 6, dtype=torch.float64), gradients(11, 6)
    moved = run(Owner(start, rows("matrix", sizes, normal(1.0))), grads)
    parts = zip(start.split([3, 5, 3]), zip(*(g.split([3, 5, 3]) for g in grads), strict=True), strict=True)
    torch.testing.assert_close(moved, torch.cat([plain_normuon(w, g) for w, g in parts]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_a_transposed_layout_moves_like_the_plain_one(shape):
    start, grads = torch.randn(shape, dtype=torch.float64), gradients(*shape)
    role = whole("matrix", "weight", normal(1.0))
    moved = run(Owner(start.mT, Role("matrix", role.logical, transposed=True)), [g.mT for g in grads])
    torch.testing.assert_close(moved.mT, plain_normuon(start, grads), rtol=0, atol=1e-12)


def test_folded_experts_are_orthogonalised_one_by_one():
    model, optimizer = built(torch.float64, expert=NORMUON | {"ns_dtype": "float64"})
    start, grads = model.experts.w1_EDF.detach().clone(), gradients(3, 7, 5)
    for gradient in grads:
        model.experts.w1_EDF.grad = gradient
        optimizer.step(1.0)
    for expert in range(3):
        expected = plain_normuon(start[expert].mT, [g[expert].mT for g in grads])
        torch.testing.assert_close(model.experts.w1_EDF[expert].mT, expected, rtol=0, atol=1e-12)


def test_cautious_decay_touches_only_weights_that_the_update_shrinks():
    start, (gradient,) = torch.randn(5, 7, dtype=torch.float64), gradients(5, 7, steps=1)
    role = whole("matrix", "weight", normal(1.0))
    without, cautious, always = (
        run(Owner(start, role), [gradient], weight_decay=decay, cautious=careful)
        for decay, careful in ((0.0, False), (0.5, True), (0.5, False))
    )
    agree = (start - without) * start > 0
    assert agree.any() and not agree.all()
    torch.testing.assert_close(cautious, torch.where(agree, always, without), rtol=0, atol=1e-15)
    torch.testing.assert_close(without - always, 0.02 * 0.5 * start, rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(64, 64), (16, 64), (64, 16)])
def test_the_update_has_the_rms_of_an_orthogonal_matrix_and_never_a_weight_a_step(shape):
    model = Owner(torch.randn(shape), whole("matrix", "weight", normal(1.0)))
    optimizer = optimizer_of(model, ns_dtype="float32", weight_decay=0.0)
    out, into = shape
    orthogonal = 0.02 * math.sqrt(max(1, out / into)) / math.sqrt(max(out, into))
    for gradient in gradients(*shape, steps=5, dtype=torch.float32):
        gradient[0] *= 30  # one loud neuron
        before = model.weight.detach().clone()
        model.weight.grad = gradient
        optimizer.step(1.0, measure=True)
        moved = (model.weight - before).square().mean().sqrt()
        torch.testing.assert_close(optimizer.update_rms()["matrix"], moved, rtol=1e-4, atol=0)
        assert 0.6 * orthogonal < moved < 1.25 * orthogonal


def test_rows_of_the_update_become_even():
    model = Owner(torch.zeros(8, 8), whole("matrix", "weight", normal(1.0)))
    grads = [torch.cat([100 * g[:1], g[1:]]) for g in gradients(8, 8, steps=1, dtype=torch.float32)]
    norms = run(model, grads, ns_dtype="float32").norm(dim=1)
    torch.testing.assert_close(norms, norms.mean().expand(8), rtol=1e-5, atol=0)


def test_a_zero_gradient_moves_nothing_and_makes_no_nan():
    start = torch.randn(4, 6)
    moved = run(Owner(start, whole("matrix", "weight", normal(1.0))), [torch.zeros(4, 6)], ns_dtype="float32")
    torch.testing.assert_close(moved, start, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["normuon", "muon"])
def test_a_tensor_that_is_no_matrix_is_refused_by_its_logical_name(name):
    model = Owner(torch.randn(2, 3, 4), whole("matrix", "weight", normal(1.0)))
    with pytest.raises(ValueError, match=r"weight has shape \(2, 3, 4\) and role 'matrix'"):
        optimizer_of(model, name=name)


def test_memory_bounded_batches_compute_the_same(monkeypatch):
    whole_model, optimizer = built(torch.float64, expert=NORMUON)
    train(whole_model, optimizer, range(2))
    monkeypatch.setattr("components.optimizers.bucket.BATCH_ELEMENTS", 35)
    pieces, optimizer = built(torch.float64, expert=NORMUON)
    train(pieces, optimizer, range(2))
    assert len(optimizer.groups["expert"].optimizer.batches) == 3
    for a, b in zip(whole_model.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)
