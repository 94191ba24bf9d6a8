"""The short convolution against its loop over taps, outputs and gradients, in float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("uses", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_add_up_the_gradients_of_all_uses(uses, packed):
    check_sums(torch.randn(2, 6, 5), torch.randn(5, 4), torch.randn(uses, 2, 6, 5), packed, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("uses", [2, 3, 4])
def test_the_kernels_add_up_the_gradients_of_all_uses_on_the_gpu(uses, dtype, tolerance):
    for shape, packed in (((2, 6, 1280), True), ((4, 1000, 1000), False), ((1, 1, 64), False)):
        x, *dys = torch.randn(1 + uses, *shape, device="cuda").to(dtype)
        check_sums(x, torch.randn(shape[2], 4, device="cuda").to(dtype), dys, packed, tolerance)


def check_sums(x, w, dys, packed, tolerance):
    starts, position = (STARTS.to(x.device), POSITION.to(x.device)) if packed else (None, None)
    apart = [torch.cat([dy, dy], -1)[..., : dy.shape[-1]] for dy in dys]  # rows with others between them
    found = launch.backward(apart, x[..., :0], x, w, starts, True)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    y = short_conv_reference(exact_x, exact_w, position_BT=position)
    expected = torch.autograd.grad((y * sum(dy.double() for dy in dys)).sum(), (exact_x, exact_w))
    again = launch.backward(list(dys), x[..., :0], x, w, starts, True)
    for one, same, other in zip(found, again, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()
        assert one.equal(same)


@pytest.mark.gpu
def test_a_recording_of_several_uses_replays_bit_for_bit():
    joint = torch.randn(2, 70, 1280 + 896, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(1280, 4, device="cuda").bfloat16().requires_grad_()
    factors = torch.randn(4, 2, 70, 1280, device="cuda").bfloat16()

    def gradients():
        *ys, rest = short_conv_beside(joint, w, uses=4)
        return torch.autograd.grad((*ys, rest), (joint, w), (*factors, torch.ones_like(rest)))

    expected = gradients()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        found = gradients()
    for _ in range(2):
        for one in found:
            one.detach().fill_(torch.nan)
        graph.replay()
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def check_kernels(x, w, dy, packed, tolerance):
    starts, position = (STARTS.to(x.device), POSITION.to(x.device)) if packed else (None, None)
    found = launch.forward(x, w, starts, True), *launch.backward([dy], x[..., :0], x, w, starts, True)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    y = short_conv_reference(exact_x, exact_w, position_BT=position)
    for one, other in zip(found, (y, *torch.autograd.grad((y * dy).sum(), (exact_x, exact_w))), strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()
    for beside in (7, 200):  # columns, fewer than a program's and more
        joint, wide = torch.cat([x, x.new_ones(*x.shape[:2], beside)], -1), dy.new_zeros(*dy.shape[:2], beside + 8)
        d_rest = wide.normal_()[..., :beside]
        dx, dw = launch.backward([dy], d_rest, joint, w, starts, True)
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


def several(joint, w, starts, uses):
    return short_conv_beside(joint, w, cu_seqlens=starts, uses=uses)


def in_checkpoint(*arguments):
    return checkpoint(several, *arguments, use_reentrant=False)


FORMS = {
    "eager": several,
    "checkpointed": in_checkpoint,
    "compiled": torch.compile(several, fullgraph=True, backend="aot_eager"),
    "compiled, checkpointed": torch.compile(in_checkpoint, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("used", [(0,), (0, 1), (1, 3), (0, 1, 2, 3), ()])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_several_uses_are_added_up(form, used, packed):
    torch._dynamo.reset()
    starts, position, uses = *((STARTS, POSITION) if packed else (None, None)), max(used, default=1) + 1
    joint = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    *found, rest = FORMS[form](joint, w, starts, uses)
    expected = short_conv_reference(joint[..., :5], w, position_BT=position)
    assert len(found) == uses and len({y.data_ptr() for y in found}) == 1
    factors, rest_factor = torch.randn(uses, 2, 6, 5, dtype=torch.float64), torch.randn_like(rest)
    totals = [
        sum((ys[i] * factors[i]).sin().sum() for i in used) + (beside * rest_factor).sum()
        for ys, beside in ((found, rest), ([expected] * uses, joint[..., 5:]))
    ]
    for y in found:
        torch.testing.assert_close(y, expected)
    for one, other in zip(*(torch.autograd.grad(t, (joint, w), materialize_grads=True) for t in totals), strict=True):
        torch.testing.assert_close(one, other)


def test_results_that_share_their_memory_are_not_changed_in_place():
    joint, w = torch.randn(1, 6, 8, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    for changed in range(3):
        ys = short_conv_beside(joint, w, uses=3)[:3]
        with pytest.raises(RuntimeError, match="inplace"):
            ys[changed].mul_(2)
            sum(y.sum() for y in ys).backward()


def test_without_gradients_all_uses_are_one_tensor():
    joint, w = torch.randn(1, 6, 8, requires_grad=True), torch.randn(5, 3)
    with torch.no_grad():
        *ys, _ = short_conv_beside(joint, w, uses=4)
    assert len({y.data_ptr() for y in ys}) == 1 and not any(y.requires_grad for y in ys)


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
    torch.library.opcheck(torch.ops.hymo.short_conv_backward, ([x, x], rest, joint, w, STARTS[:5], True))


def test_a_wrong_shape_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="W from 2 to 4"):
        short_conv(torch.randn(1, 3, 4), torch.randn(4, 5))
    with pytest.raises(ValueError, match="1 to 4 times, not 5"):
        short_conv_beside(torch.randn(1, 3, 4), torch.randn(4, 2), uses=5)
    with pytest.raises(ValueError, match="not both"):
        short_conv(torch.randn(1, 3, 4), torch.randn(4, 2), cu_seqlens=STARTS, state_BWC=torch.randn(1, 1, 4))
