"""What the Triton forms launch at the first call of a kind and at later ones: on a stand-in for Triton's compiler."""

import dataclasses
import itertools

import pytest
import torch

from components.kernels.gated_delta_rule import small_heads, tiles, wide_heads
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.gated_delta_rule.launch_small import SmallHeads
from components.kernels.gated_delta_rule.launch_wide import WideHeads
from components.kernels.launcher import Kernel

B, T, H, K, V = 2, 80, 2, 16, 16
STARTS = [0, 7, 80, 160, 160]
FORMS = pytest.mark.parametrize("config", [SmallHeads(segment=64), WideHeads()], ids=["small", "wide"])
LAUNCHES = {SmallHeads: 11, WideHeads: 8}


class Jitted:
    """Compiles like `triton.jit`; what it compiles writes down what it is launched with."""

    function = packed_metadata = None

    def __init__(self, name, arg_names, launched):
        self.name, self.arg_names, self.launched = name, arg_names, launched

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self

    def run(self, x, y, z, stream, *arguments):
        self.launched.append((self.name, x, stream, *arguments))


@pytest.fixture
def launched(monkeypatch):
    """The launches of a test, but those that compile a kernel."""
    found = []
    for module in (tiles, small_heads, wide_heads):
        for name, kernel in vars(module).items():
            if isinstance(kernel, Kernel):
                monkeypatch.setattr(kernel, "jitted", Jitted(name, kernel.jitted.arg_names, found))
                monkeypatch.setattr(kernel, "_compiled", {})
    monkeypatch.setattr("components.kernels.launcher._stream", lambda: "stream")
    return found


def zeros(*shape, dtype=torch.float32, shift=0):
    """`shift` elements off an aligned address."""
    return torch.zeros(torch.Size(shape).numel() + shift, dtype=dtype)[shift:].view(shape)


def inputs(scale=0.25, initial=True, packed=True, joint=False, G=H):
    """Of one layout for the same options, at addresses of their own."""
    parts = (G * K, G * K, H * V)
    q, k, v = zeros(B, T, sum(parts)).split(parts, -1) if joint else (zeros(B, T, width) for width in parts)
    state = zeros(len(STARTS) - 1 if packed else B, H, K, V) if initial else None
    starts = torch.tensor(STARTS, dtype=torch.int32) if packed else None
    q, k, v = q.unflatten(-1, (G, K)), k.unflatten(-1, (G, K)), v.unflatten(-1, (H, V))
    return Inputs(q, k, v, zeros(B, T, H), zeros(B, T, H), zeros(H), zeros(H), state, starts, scale)


def call(form, x, do=None, final=True):
    _, state, kept = form.forward(x, final)
    form.backward(x, kept, zeros(B, T, H, V) if do is None else do, state if final else None)


def in_the_same_memory(form, x, do):
    """Makes every call of the form allocate the same tensors, by the order in which it asks."""
    new, new_like, memory = form.new, form.new_like, {}

    def call_again():
        places = itertools.count()
        form.new = lambda *shape, **options: memory.setdefault(next(places), new(*shape, **options))
        form.new_like = lambda x: memory.setdefault(next(places), new_like(x))
        call(form, x, do)

    return call_again


@FORMS
@pytest.mark.parametrize(
    "options",
    [{"packed": False, "initial": False}, {"packed": False}, {}, {"packed": False, "joint": True}, {"G": 1}],
    ids=["plain", "initial state", "documents", "views of one tensor", "heads in groups"],
)
def test_later_calls_launch_what_they_would_if_they_were_the_first_of_their_kind(config, options, launched):
    form = config.launch(inputs(**options))
    call(form, inputs(**options))
    launched.clear()
    again = in_the_same_memory(form, inputs(**options, scale=0.5), zeros(B, T, H, V))
    again()
    repeated = launched.copy()
    form._launches.clear()
    launched.clear()
    again()
    assert repeated == launched
    assert len(launched) == LAUNCHES[type(config)] + 2 * form.packed  # slots are looked up both ways


@FORMS
def test_tensors_that_were_one_at_the_first_call_are_told_apart_later(config, launched):
    x = inputs(packed=False)
    form = config.launch(x)
    call(form, dataclasses.replace(x, k_BTGK=x.q_BTGK, b_BTH=x.a_BTH), x.v_BTHV)
    do = zeros(B, T, H, V)
    again = in_the_same_memory(form, x, do)
    again()
    repeated = launched.copy()
    assert all(any(y.data_ptr() in one for one in repeated) for y in (*x.tensors()[:8], do))
    form._launches.clear()
    launched.clear()
    again()
    assert repeated == launched


@FORMS
def test_launches_are_remembered_apart_for_all_that_the_layout_of_inputs_leaves_open(config, launched):
    """Dtype and alignment of the outputs' gradients, and which outputs there are."""
    x = inputs()
    form = config.launch(x)
    _, state, kept = form.forward(x, True)
    form.forward(x, False)
    others = zeros(B, T, H, V), zeros(B, T, H, V, dtype=torch.float64), zeros(B, T, H, V, shift=1)
    ends = None, zeros(*state.shape), zeros(*state.shape, shift=1)
    for gradients in [*itertools.product(others, ends), (others[0].clone(), ends[1].clone())]:
        form.backward(x, kept, *gradients)
    assert len(form._launches) == 2 + len(others) * len(ends)


@FORMS
def test_what_is_repeated_reads_copies_of_gradients_that_are_not_contiguous(config, launched):
    x = inputs(packed=False)
    form = config.launch(x)
    strided = zeros(B, H, T, V).transpose(1, 2)
    for _ in range(2):
        call(form, x, strided)
    assert len(form._launches) == 2
    assert len(launched) == LAUNCHES[type(config)]
    assert not any(strided.data_ptr() in one for one in launched)
