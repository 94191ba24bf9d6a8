"""A router's product: the op against autograd of the written-out form, the Triton form against both in float64."""

import pytest
import torch

from components.kernels.router_product import op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run on either
SIZES = [(5, 24, 4), (70, 136, 17), (600, 40, 65)]  # tokens, width, experts: less than a tile, and parts of several


def inputs(N, D, E, dtype=torch.float32):
    g = torch.Generator(DEVICE).manual_seed(0)
    x, weight, dy = (torch.randn(*shape, generator=g, device=DEVICE) for shape in ((N, D), (E, D), (N, E)))
    return x.to(dtype), weight, dy


def in_float64(x, weight, dy):
    x, weight, dy = x.double(), weight.double(), dy.double()
    return x @ weight.mT, dy @ weight, dy.mT @ x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_gives_autograds_outputs_and_gradients(dtype):
    x, weight, dy = inputs(7, 12, 5, dtype)
    both = []
    for function in (op.router_product, lambda x, w: x.float() @ w.mT):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(*leaves)
        both.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for found, wanted in zip(*both, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def check_triton(N, D, E, dtype):
    x, weight, dy = inputs(N, D, E, dtype)
    results = (
        op.launch_product(x, weight),
        op.launch_input_gradient(dy, weight, dtype),
        op.launch_weight_gradient(dy, x),
    )
    dtypes = torch.float32, dtype, torch.float32
    for found, wanted, kept in zip(results, in_float64(x, weight, dy), dtypes, strict=True):
        assert found.dtype == kept
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < (4e-3 if kept.itemsize == 2 else 5e-6)  # products of TF32 err by 2e-4


@pytest.mark.parametrize("sizes", SIZES)
def test_the_triton_form_gives_the_same(sizes):
    check_triton(*sizes, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # products that the interpreter does not do right
@pytest.mark.parametrize("sizes", SIZES)
def test_the_triton_form_gives_the_same_from_short_dtypes(sizes, dtype):
    check_triton(*sizes, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_triton_form_gives_the_same_at_the_primarys_size_also_where_tf32_is_allowed(dtype, tf32):
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, tf32
    try:
        check_triton(16384, 896, 16, dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_the_op_compiles_without_a_break():
    x, weight, dy = inputs(6, 8, 4)
    x, weight, dy = (t.cpu() for t in (x, weight, dy))
    weight.requires_grad_()
    y = torch.compile(op.router_product, fullgraph=True, backend="aot_eager")(x, weight)
    torch.testing.assert_close(torch.autograd.grad(y, weight, dy)[0], dy.mT @ x)
