"""Newton-Schulz and its kernels against float64."""

import pytest
import torch

from components.kernels.newton_schulz import launch
from components.kernels.newton_schulz.op import newton_schulz
from components.kernels.newton_schulz.reference import newton_schulz_reference

SHAPES = [(5, 5), (4, 9), (9, 4), (1, 7), (7, 1), (1, 1), (40, 64)]


def draw(m, n, count=3):
    return torch.randn(count, m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(m * 100 + n))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_a_batch_equals_the_float64_reference_matrix_by_matrix(shape, dtype, tolerance):
    x = draw(*shape)
    expected = torch.stack([newton_schulz_reference(matrix) for matrix in x])
    assert newton_schulz(x, dtype).dtype == dtype
    torch.testing.assert_close(newton_schulz(x, dtype).double(), expected, rtol=0, atol=tolerance)


def test_every_singular_value_lands_near_one():
    singular = torch.linalg.svdvals(newton_schulz(draw(24, 32), torch.float64))
    assert singular.min() > 0.6 and singular.max() < 1.3


def test_the_result_does_not_depend_on_the_scale_of_the_input():
    x = draw(6, 8)
    tiny = newton_schulz(1e-12 * x, torch.float32)
    torch.testing.assert_close(tiny, newton_schulz(x, torch.float32), rtol=0, atol=2e-5)


def test_a_zero_matrix_stays_zero_and_no_matrix_gives_none():
    assert not newton_schulz(torch.zeros(2, 3, 4), torch.bfloat16).any()
    assert newton_schulz(torch.zeros(0, 3, 4), torch.float32).shape == (0, 3, 4)


# Rows and columns that divide into tiles and that do not; one tile, and several with mirrored ones.
@pytest.mark.parametrize("shape", [(2, 32, 48), (3, 40, 21), (1, 9, 16), (2, 50, 70)])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("wide", [1, 2])
def test_the_symmetric_product_in_triton_equals_torch(monkeypatch, shape, tall, wide):
    monkeypatch.setattr(launch, "HIGH", 16)
    monkeypatch.setattr(launch, "WIDE", wide)
    monkeypatch.setattr(launch, "COLUMNS", 16)
    check_symmetric_product(torch.randn(shape) if not tall else torch.randn(shape).mT.contiguous().mT, 1e-6)


def check_symmetric_product(x, tolerance):
    factor = torch.rand(len(x), 1, 1, device=x.device) + 0.5
    gram, scaled = launch.symmetric_product(x), launch.symmetric_product(x, factor_N11=factor)
    polynomial = launch.symmetric_product(gram, gram, alpha=0.1, beta=0.7, diagonal=3.0, factor_N11=factor)
    wide, square = x.double(), gram.double()
    identity = torch.eye(x.shape[1], dtype=torch.float64, device=x.device)
    for found, expected in (
        (gram, wide @ wide.mT),
        (scaled, factor * (wide @ wide.mT)),
        (polynomial, factor * (0.1 * square @ square + 0.7 * square + 3 * identity)),
    ):
        assert (found.double() - expected).norm() <= tolerance * expected.norm()
        assert torch.equal(found, found.mT)


@pytest.mark.parametrize("shape", [(2, 33, 300), (1, 5, 1), (3, 16, 16)])
@pytest.mark.parametrize("axes", [(1, 1), (2, 1), (1, 2)])
def test_the_scaling_in_triton_equals_torch_for_a_factor_a_matrix_a_row_and_a_column(shape, axes):
    x = torch.randn(shape)
    factor = torch.randn(shape[0], shape[1] if axes[0] == 2 else 1, shape[2] if axes[1] == 2 else 1)
    for views in (factor, factor.mT.contiguous().mT):
        torch.testing.assert_close(launch.scale(x, views, torch.empty_like(x)), x * factor)
    torch.testing.assert_close(launch.scale(x.bfloat16(), factor, x.bfloat16()), (x.bfloat16() * factor).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 1280, 896), (2, 900, 1000), (2, 512, 64)])
def test_newton_schulz_with_the_symmetric_kernel_errs_as_without_on_the_gpu(monkeypatch, shape):
    x = torch.randn(shape, device="cuda")
    for matrices in (x, x.mT):
        check_symmetric_product(matrices.bfloat16(), 4e-3)
        exact = newton_schulz(matrices, torch.float64)
        with_kernel = newton_schulz(matrices, torch.bfloat16)
        with monkeypatch.context() as patched:
            patched.setattr(launch, "pays", lambda x: False)
            without = newton_schulz(matrices, torch.bfloat16)
        errors = [(found.double() - exact).norm() / exact.norm() for found in (with_kernel, without)]
        assert errors[0] < 1.2 * errors[1] < 0.1
