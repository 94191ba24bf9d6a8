"""Which parts are marked for recomputation; that it changes no number is held by the tests of plans and families."""

import pytest

from components.parallel.activation_checkpoint import apply_activation_checkpoint
from tests.models.tiny import model


@pytest.mark.parametrize(
    ("how", "marked"),
    [
        (("none", "op"), [[], [], [], []]),
        (("full", "op"), [["block"]] * 4),
        (("selective", "2"), [["block"], [], ["block"], []]),
        (("selective", "op", ("gdn",)), [[], ["mixer"], [], ["mixer"]]),
        (("full", "op", ("mla", "experts")), [["mixer", "ffn"], [], ["mixer", "ffn"], []]),
    ],
)
def test_every_block_every_nth_or_every_part_of_a_label_is_recomputed(how, marked):
    lm = model()  # mla with experts, gdn, and both again
    apply_activation_checkpoint(lm, *how)
    assert [list(block.recompute) for block in lm.layers] == marked
