"""The short convolution against its loop over taps, outputs and gradients, in float64."""

import pytest
import torch

from components.kernels.short_conv import launch, short_conv, short_conv_beside, short_conv_state, short_conv_step
from components.kernels.short_conv.reference import short_conv_reference

STARTS = torch.tensor([0, 1, 1, 4, 6, 7, 12, 12], dtype=torch.int32)  # two rows of 6
POSITION = torch.tensor([[0, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4]])


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("packed", [False, True])
def test_output_and_gradients_equal_the_loop_over_taps(width, activation, packed):
    x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, width, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    found = short_conv(x, w, cu_seqlens=STARTS if packed else None, activation=activation)
    expected = short_conv_reference(x, w, position_BT=POSITION if packed else None, activation=activation)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad((y * dy).sum(), (x, w)) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("B", "T", "C", "W", "packed"), [(2, 6, 5, 4, True), (1, 70, 12, 3, False), (1, 3, 8, 2, False)]
)
def test_the_kernels_equal_the_loop_over_taps(B, T, C, W, packed):
    check_kernels(torch.randn(B, T, C), torch.randn(C, W), torch.randn(B, T, C), packed, 1e-6)


def check_kernels(x, w, dy, packed, tolerance):
    starts, position = (STARTS.to(x.device), POSITION.to(x.device)) if packed else (None, None)
    found = launch.forward(x, w, starts, True), *launch.backward(dy, x[..., :0], x, w, starts, True)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    y = short_conv_reference(exact_x, exact_w, position_BT=position)
    for one, other in zip(found, (y, *torch.autograd.grad((y * dy).sum(), (exact_x, exact_w))), strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()
    for beside in (7, 200):  # columns, fewer than a program's and more
        joint, wide = torch.cat([x, x.new_ones(*x.shape[:2], beside)], -1), dy.new_zeros(*dy.shape[:2], beside + 8)
        d_rest = wide.normal_()[..., :beside]
        dx, dw = launch.backward(dy, d_rest, joint, w, starts, True)
        assert dx.equal(torch.cat([found[1], d_rest], -1)) and dw.equal(found[2])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
def test_the_kernels_equal_the_loop_over_taps_on_the_gpu(dtype, tolerance):
    for shape, packed in (((2, 6, 1280), True), ((4, 1000, 1000), False), ((1, 1, 64), False)):
        x, dy = torch.randn(2, *shape, device="cuda").to(dtype)
        check_kernels(x, torch.randn(shape[2], 4, device="cuda").to(dtype), dy, packed, tolerance)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_columns_beside_the_convolved_ones_pass_through(packed, beside, compiled):
    starts = STARTS if packed else None
    function = torch.compile(short_conv_beside, fullgraph=True, backend="aot_eager") if compiled else short_conv_beside
    joint = torch.randn(2, 6, 5 + beside, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    found = function(joint, w, cu_seqlens=starts)
    expected = short_conv(joint[..., :5], w, cu_seqlens=starts), joint[..., 5:]
    factors = [torch.randn_like(y) for y in expected]

    def gradients(outputs, used):
        total = sum((outputs[i] * factors[i]).sum() for i in used)
        return torch.autograd.grad(total, (joint, w), retain_graph=True, materialize_grads=True)

    for used in ([0], [0, 1], [1])[: 3 if beside else 2]:  # what the loss depends on
        for one, other in zip(gradients(found, used), gradients(expected, used), strict=True):
            assert one.equal(other)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])


@pytest.mark.parametrize("T", [1, 2, 9])
def test_prefill_then_steps_equal_the_whole_sequence(T):
    x, w = torch.randn(2, T + 5, 3), torch.randn(3, 4)
    whole = short_conv(x, w)
    state = short_conv_state(x[:, :T], 4)
    torch.testing.assert_close(short_conv(x[:, T:], w, state_BWC=state), whole[:, T:])
    for t in range(T, T + 5):
        y, state = short_conv_step(x[:, t], w, state)
        torch.testing.assert_close(y, whole[:, t])
    torch.testing.assert_close(state, short_conv_state(x, 4))


def test_the_op_passes_pytorchs_own_checks():
    x, w, rest = torch.randn(1, 6, 4), torch.randn(4, 3), torch.randn(1, 6, 2)
    torch.library.opcheck(torch.ops.hymo.short_conv, (x, w, STARTS[:5], True))
    joint = torch.cat([x, rest], -1)
    torch.library.opcheck(torch.ops.hymo.short_conv_backward, (x, rest, joint, w, STARTS[:5], True))


def test_a_wrong_shape_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="W from 2 to 4"):
        short_conv(torch.randn(1, 3, 4), torch.randn(4, 5))
    with pytest.raises(ValueError, match="not both"):
        short_conv(torch.randn(1, 3, 4), torch.randn(4, 2), cu_seqlens=STARTS, state_BWC=torch.randn(1, 1, 4))
