"""The factors of rows: the operations and the kernel against their equation."""

import pytest
import torch

from components.kernels.even_rows.op import even_rows, launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernel runs on either
FORMS = [even_rows, launch]


def draw(*shape):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape, generator=generator) + 0.1).to(DEVICE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 16), (1, 1), (2, 300)])
def test_rows_become_even_and_the_matrix_keeps_its_norm_times_the_scale(form, shape):
    norm_Nm, moment_Nm = draw(*shape), draw(*shape).flip(-1)
    moment = 0.9 * moment_Nm.double() + 0.1 * norm_Nm.double().square() / 7
    even = norm_Nm.double() / (moment.sqrt() + 1e-10)
    wanted = even * (norm_Nm.double().norm(dim=1) / even.norm(dim=1))[:, None]
    factor_Nm = form(norm_Nm, moment_Nm, 7, 0.9, 1.5)
    torch.testing.assert_close(moment_Nm.double(), moment, rtol=1e-6, atol=0)
    torch.testing.assert_close((norm_Nm * factor_Nm).double(), 1.5 * wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_zero_rows_stay_zero_and_make_no_nan(form):
    norm_Nm, moment_Nm = torch.zeros(2, 4, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    norm_Nm[1, :2] = 1.0
    found = norm_Nm * form(norm_Nm, moment_Nm, 7, 0.95, 1.0)
    torch.testing.assert_close(found, norm_Nm, rtol=1e-5, atol=0)
    assert not moment_Nm[0].any() and not moment_Nm[1, 2:].any()
