"""The gated delta rule in chunks against the token-by-token form, outputs and gradients, in float64."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from components.kernels.gated_delta_rule import chunk as in_pytorch
from components.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_step, op
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.gated_delta_rule.reference import gated_delta_rule_reference

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "initial_state")


def inputs(B=2, T=70, G=2, H=4, K=16, V=24, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = [draw(B, T, G, K), draw(B, T, G, K), draw(B, T, H, V), draw(B, T, H), draw(B, T, H)]
    x = [y.to(dtype) for y in x] + [draw(H) * 0.5, draw(H) * 0.5 - 1, draw(B, H, K, V)]
    return [y.requires_grad_() for y in x]


def run(rule, x, do, dstate, **options):
    o, state = rule(*x[:7], initial_state_BHKV=x[7], **options)
    loss = (o * do).sum() + (0 if dstate is None else (state * dstate).sum())
    return [o.detach(), state.detach(), *torch.autograd.grad(loss, x)]


LENGTHS = [(T, 0) for T in (1, 2, 15, 63, 64, 65, 130)] + [(T, C) for C in (16, 32, 128) for T in (1, C + 1, 130)]


@pytest.mark.parametrize(("T", "chunk"), LENGTHS)
def test_the_chunked_form_equals_the_sequential_one_to_rounding(T, chunk):
    x = inputs(T=T)
    do, dstate = torch.randn(2, T, 4, 24, dtype=torch.float64), torch.randn(2, 4, 16, 24, dtype=torch.float64)
    slow = run(gated_delta_rule_reference, x, do, dstate)
    fast = run(gated_delta_rule, x, do, dstate, return_state=True, chunk=chunk)
    for name, expected, found in zip(("o", "state", *NAMES), slow, fast, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_that_are_documents_are_computed_without_a_look_at_a_value_so_that_a_graph_can_hold_them():
    with FakeTensorMode():  # refuses what depends on values
        q, k, v, a, b, A_log, dt_bias, _ = (torch.empty(y.shape, dtype=y.dtype) for y in inputs())
        x = Inputs(q, k, v, a, b, A_log, dt_bias, None, None, 1.0)
        o, _ = in_pytorch.forward(x, return_state=False)
        gradients = in_pytorch.backward(x, o, None)
        assert [y.shape for y in gradients[:5]] == [y.shape for y in (q, k, v, a, b)]


@pytest.mark.parametrize("chunk", [0, 16, 32])
def test_packed_documents_equal_separate_calls(chunk):
    lengths = [1, 0, 17, 62, 40, 40]  # rows of 80: the boundary at 80 is one of them
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0), 160, 160], dtype=torch.int32)
    x = inputs(B=2, T=80)
    states = torch.randn(len(starts) - 1, 4, 16, 24, dtype=torch.float64, requires_grad=True)
    packed, final = gated_delta_rule(
        *x[:7], initial_state_BHKV=states, cu_seqlens=starts, return_state=True, chunk=chunk
    )
    do, dstate = torch.randn_like(packed), torch.randn_like(final)
    found = torch.autograd.grad((packed * do).sum() + (final * dstate).sum(), [*x[:7], states])
    flat = [y.flatten(0, 1)[None] for y in x[:5]]
    o, ends = [], []
    for i, (start, stop) in enumerate(pairwise(starts)):
        if start == stop:
            ends.append(states[i : i + 1])
            continue
        part = [y[:, start:stop] for y in flat]
        one, end = gated_delta_rule_reference(*part, *x[5:7], initial_state_BHKV=states[i : i + 1])
        o.append(one), ends.append(end)
    o, ends = torch.cat(o, 1).view_as(packed), torch.cat(ends)
    expected = torch.autograd.grad((o * do).sum() + (ends * dstate).sum(), [*x[:7], states])
    for one, other in zip([packed, final, *found], [o, ends, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_steps_one_by_one_equal_the_whole_sequence():
    x = [y.detach() for y in inputs(T=9)]
    o, final = gated_delta_rule(*x[:7], initial_state_BHKV=x[7], return_state=True)
    state = x[7]
    for t in range(9):
        step, state = gated_delta_rule_step(*(y[:, t] for y in x[:5]), *x[5:7], state)
        torch.testing.assert_close(step, o[:, t])
    torch.testing.assert_close(state, final)


def test_the_op_passes_pytorchs_own_checks_and_compiles_whole():
    x = inputs(B=1, T=5, G=1, H=2, K=4, V=4, dtype=torch.float32)
    x = [y.detach().float().requires_grad_() for y in x]
    torch.library.opcheck(torch.ops.hymo.gated_delta_rule, (*x, None, 0.5, 32, True))
    compiled = torch.compile(
        lambda *x: gated_delta_rule(*x, chunk=32)[0].square().sum(), fullgraph=True, backend="aot_eager"
    )
    expected = torch.autograd.grad(gated_delta_rule(*x[:7])[0].square().sum(), x[:7])
    found = torch.autograd.grad(compiled(*x[:7]), x[:7])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Watching(TorchDispatchMode):
    """Sees every op, as compilers and the modes of recomputation do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("initial", [False, True])
def test_a_mode_that_watches_sees_the_op_and_the_same_outputs_and_gradients(initial):
    x = inputs(T=9)
    given = {"initial_state_BHKV": x[7] if initial else None, "return_state": True}
    wanted = x if initial else x[:7]

    def outputs_and_gradients():
        o, state = gated_delta_rule(*x[:7], **given)
        return o, state, *torch.autograd.grad(o.square().sum() + state.sum(), wanted)

    expected = outputs_and_gradients()
    with Watching() as mode:
        found = outputs_and_gradients()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [name for name in mode.seen if "hymo" in name] == [
        "hymo.gated_delta_rule.default",
        "hymo.gated_delta_rule_backward.default",
    ]


@pytest.mark.parametrize("without_values", [lambda x: x.to("meta"), FakeTensorMode().from_tensor], ids=["meta", "fake"])
def test_tensors_without_values_have_the_shapes_of_the_op(without_values):
    x = [without_values(y) for y in inputs(T=9)]
    o, state = gated_delta_rule(*x[:7], return_state=True)
    assert (o.shape, state.shape) == ((2, 9, 4, 24), (2, 4, 16, 24))


def test_second_derivatives_are_refused():
    x = inputs(T=3)
    (dq,) = torch.autograd.grad(gated_delta_rule(*x[:7])[0].square().sum(), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


def test_a_whole_scale_is_a_number_like_any_other(monkeypatch):
    """Triton would compile an int of 1 into the kernel, which is then remembered for every scale."""
    scales, forward = [], in_pytorch.forward
    monkeypatch.setattr(in_pytorch, "forward", lambda x, state: scales.append(x.scale) or forward(x, state))
    gated_delta_rule(*inputs(T=2)[:7], scale=1)
    assert scales == [1.0] and type(scales[0]) is float


def packed(T=6, **changes):
    """Inputs of one layout, of fresh values at fresh addresses."""
    starts = torch.tensor([0, 2, T, 2 * T], dtype=torch.int32)
    x = inputs(T=T)
    states = torch.zeros(3, 4, 16, 24)
    return replace(Inputs(*x[:7], states, starts, scale=torch.rand(()).item()), **changes)


def test_inputs_have_one_layout_only_if_they_differ_in_values_and_addresses_alone():
    """By which a form, its buffers and its compiled kernels are remembered."""
    x = packed()
    assert x.layout() == packed().layout()
    shifted = torch.empty(x.v_BTHV.numel() + 1, dtype=torch.float64)[1:].view(x.v_BTHV.shape)
    others = [
        packed(T=7),
        replace(x, chunk=32),
        replace(x, a_BTH=x.a_BTH.float()),
        replace(x, k_BTGK=x.k_BTGK.transpose(1, 2).contiguous().transpose(1, 2)),
        replace(x, v_BTHV=shifted),
        replace(x, v_BTHV=x.v_BTHV.to("meta")),
        replace(x, initial_state_LHKV=None),
        replace(x, starts_L1=x.starts_L1[:3]),
        replace(x, starts_L1=None),
    ]
    assert len({y.layout() for y in (x, *others)}) == 1 + len(others)


def test_a_form_is_worked_out_once_a_layout_until_there_are_many_or_the_switch_is_set(monkeypatch):
    made = []
    monkeypatch.setattr(op, "_form", lambda x: made.append(x) or len(made))
    monkeypatch.setattr(op, "_forms", {})
    monkeypatch.setattr(op, "MOST_FORMS", 2)
    assert [op._form_again(packed(T))[0] for T in (4, 5, 4, 6, 4)] == [1, 2, 1, 3, 4]
    op.use_fused(True)
    assert op._form_again(packed(4))[0] == 5


def test_inputs_that_a_form_reads_as_copies_are_copied_by_every_call(monkeypatch):
    monkeypatch.setattr(op, "_form", lambda x: x.layout())
    monkeypatch.setattr(op, "_forms", {})
    for _ in range(2):
        x = packed()
        k = x.k_BTGK.transpose(1, 2).contiguous().transpose(1, 2)
        form, read = op._form_again(replace(x, k_BTGK=k))
        assert read.k_BTGK.is_contiguous() and torch.equal(read.k_BTGK, k) and read.q_BTGK is x.q_BTGK
        assert form == read.layout()
        assert op._form_again(x) == (x.layout(), x)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: [*x[:1], x[1][..., :3], *x[2:]], "q and k of one shape"),
        (lambda x: [*x[:2], x[2][:, :, :3], *x[3:]], "H a multiple of q's 2 heads"),
        (lambda x: [*x[:3], x[3][..., :1], *x[4:]], "needs a of shape"),
        (lambda x: [*x[:7], x[7][:1]], "initial state must have shape"),
    ],
)
def test_a_wrong_shape_is_refused_in_one_sentence(change, sentence):
    x = change(inputs(T=3))
    with pytest.raises(ValueError, match=sentence):
        gated_delta_rule(*x[:7], initial_state_BHKV=x[7])
