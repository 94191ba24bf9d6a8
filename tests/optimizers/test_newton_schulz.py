import pytest
import torch

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
