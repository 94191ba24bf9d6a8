"""Kernels found again without Triton's look at every argument: on a stand-in for Triton's compiled kernels."""

import itertools

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends import backends

from components.kernels.launcher import Kernel, Launches, _specialisation


class Jitted:
    """Compiles (counts) like `triton.jit`; what it compiles records the arguments it is launched with."""

    arg_names = ("x", "n", "BLOCK", "WIDE")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, num_warps, **constants):
            self.compiled += 1
            return self

        return compile_and_launch

    def run(self, x, y, z, stream, *arguments):
        assert (stream, arguments[:5]) == ("stream", ("function", "metadata", None, None, None))
        self.launched.append(((x, y, z), arguments[5:]))


@pytest.fixture
def jitted(monkeypatch):
    monkeypatch.setattr("components.kernels.launcher._stream", lambda: "stream")
    return Jitted()


def test_a_kernel_is_compiled_once_and_launched_with_its_constants_in_the_order_of_its_signature(jitted):
    x, kernel = torch.zeros(64), Kernel(jitted)
    kernel(4, x, 32, WIDE=True, BLOCK=8)
    kernel(5, x, 48, WIDE=True, BLOCK=8)
    assert jitted.compiled == 1
    assert jitted.launched == [((5, 1, 1), (x.data_ptr(), 48, 8, True))]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: ((x.half(), 32), {}),
        lambda x: ((x[1:], 32), {}),
        lambda x: ((x, 33), {}),
        lambda x: ((x, 1), {}),
        lambda x: ((x, 2**40), {}),
        lambda x: ((x, 32), {"BLOCK": 16}),
        lambda x: ((x, 32), {"num_warps": 8}),
    ],
    ids=["dtype", "alignment of a tensor", "alignment of a number", "one", "64 bits", "constant", "warps"],
)
def test_what_triton_specialises_on_compiles_a_kernel_anew(jitted, change):
    x, kernel = torch.zeros(64), Kernel(jitted)
    kernel(4, x, 32, BLOCK=8, WIDE=True)
    arguments, options = change(x)
    kernel(4, *arguments, **{"BLOCK": 8, "WIDE": True, **options})
    assert jitted.compiled == 2
    assert jitted.launched == []


def test_launches_taken_down_are_repeated_with_the_addresses_and_numbers_of_another_call(jitted):
    x, scale, kernel, taken = torch.zeros(64), 0.25, Kernel(jitted), []
    kernel(4, x, 32, BLOCK=8, WIDE=True, taken=taken)
    kernel(6, x[16:], scale, BLOCK=8, WIDE=True, taken=taken)
    launches = Launches(taken, [None, scale, taken[1][2][0], x])
    assert jitted.launched == []
    launches([0, 0.75, 128, 256])
    assert jitted.launched == [((4, 1, 1), (256, 32, 8, True)), ((6, 1, 1), (128, 0.75, 8, True))]


def test_launches_of_a_tensor_that_is_not_the_calls_own_are_not_repeated(jitted):
    x, kernel, taken = torch.zeros(64), Kernel(jitted), []
    kernel(4, x.clone(), 32, BLOCK=8, WIDE=True, taken=taken)
    with pytest.raises(ValueError, match="not the call's own"):
        Launches(taken, [x])


def test_arguments_share_a_key_only_where_triton_compiles_them_alike():
    tensors = [x[i:] for x in (torch.zeros(64), torch.zeros(64).half(), torch.zeros(64).int()) for i in (0, 1, 4, 8)]
    numbers = [0, 1, 2, 15, 16, 17, 320, 333, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**40]
    backend = backends["nvidia"].compiler
    for one, other in itertools.combinations([*tensors, torch.zeros(0), *numbers, 0.5, 1.0], 2):
        if _specialisation(one) == _specialisation(other):
            theirs = [native_specialize_impl(backend, x, False, True, True) for x in (one, other)]
            assert theirs[0] == theirs[1], (one, other)
