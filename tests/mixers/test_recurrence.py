"""What the mixers with a gated delta rule share."""

import pytest
import torch
import torch.nn.functional as F

from components.mixers.recurrence import Recurrence
from components.parameters import initialise
from registry import RecipeError, parse_component
from tests.contracts.parts import context

DIM, LENGTH = 16, 70
MIXERS = [
    {"name": "hymo_gdn", "inner": 32, "head_dim": 8, "state_dim": 8},
    {"name": "gated_deltanet", "heads": 2, "key_dim": 8},
]


def outputs(table: dict, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the whole sequence, and of its prefill."""
    mixer = parse_component("mixer", table).build(dim=DIM, layer=0, branches=4)
    initialise(mixer, seed=0)
    mixer, ctx = mixer.double(), context(1, LENGTH)
    cache = mixer.new_cache(1, LENGTH, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        return mixer(x, ctx)[0], mixer(x, ctx, cache)[0]


def test_decays_begin_as_gated_deltanet_has_them_or_as_the_document_does():
    """A ~ U(0, 16), steps log-uniform in [0.001, 0.1]; or A = 1 … H with steps of softplus(0)."""
    drawn = Recurrence(4096, "gdn", skip=True, chunk=0)
    initialise(drawn, 0)
    A, step = drawn.A_log.exp(), F.softplus(drawn.dt_bias)
    assert A.min() > 0 and 15.9 < A.max() <= 16 and abs(A.mean() - 8) < 0.3
    assert step.min() >= 0.000999 and step.max() <= 0.1001
    assert abs(step.log10().mean() + 2) < 0.05 and abs(step.log10().std() - 2 / 12**0.5) < 0.03
    document = Recurrence(5, "arange", skip=False, chunk=0)
    initialise(document, 0)
    torch.testing.assert_close(document.A_log.exp(), torch.arange(1.0, 6.0))
    assert not document.dt_bias.any()


@pytest.mark.parametrize("table", MIXERS, ids=lambda table: table["name"])
def test_the_chunk_reaches_the_recurrence_and_changes_rounding_alone(table):
    x = torch.randn(1, LENGTH, DIM, dtype=torch.float64)
    tuned, chunked = outputs(table, x), outputs(table | {"chunk": 16}, x)
    for one, other in zip(tuned, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("table", "offered"),
    [
        ({"name": "hymo_gdn", "inner": 64, "head_dim": 32, "chunk": 64}, "16 and 32"),
        ({"name": "gated_deltanet", "heads": 2, "key_dim": 64, "chunk": 16}, "32 and 64"),
        ({"name": "gated_deltanet", "heads": 2, "key_dim": 256, "chunk": 8}, "16, 32, 64 and 128"),
    ],
)
def test_a_chunk_without_a_kernel_is_refused_before_a_mixer_is_built(table, offered):
    with pytest.raises(RecipeError, match=rf"chunk = {table['chunk']}: heads .* have kernels for chunks of {offered} "):
        parse_component("mixer", table)
