"""Packing: document numbers, positions, cu_seqlens and valid targets, against a plain reading of the tokens."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.packing import cu_seqlens_length, pack, valid_targets
from components.data.shards import MIN_DOCUMENT

T = 96
lengths = st.lists(st.integers(MIN_DOCUMENT, 60), min_size=1, max_size=8)


def window(lengths, cut):
    """T + 1 tokens of documents of `lengths`, of whose first `cut` tokens are in the window before; ends are 0."""
    tokens, starts = [], []
    while len(tokens) < T + 1 + cut:
        for length in lengths:
            starts.append(len(tokens))
            tokens += [*range(1, length), 0]
    starts = np.array(starts) - cut
    return np.array(tokens[cut : cut + T + 1]), starts[(starts > 0) & (starts <= T)]


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(lengths, st.integers(0, MIN_DOCUMENT - 1)), min_size=1, max_size=3))
def test_documents_positions_and_starts_follow_the_end_tokens(rows):
    batch = pack([window(*row) for row in rows], np.arange(len(rows)), "document")
    starts = []
    for b, tokens in enumerate(batch.tokens_BT1.tolist()):
        document, position = 0, 0
        for t in range(T + 1):
            if t > 0 and tokens[t - 1] == 0:
                document, position = document + 1, 0
            if position == 0 and t < T:
                starts.append(b * T + t)
            assert batch.document_BT1[b, t] == document
            assert t == T or batch.position_BT[b, t] == position
            position += 1
    length = cu_seqlens_length(len(rows), T)
    assert batch.cu_seqlens.tolist() == starts + [len(rows) * T] * (length - len(starts))
    assert batch.cu_seqlens.dtype == batch.document_BT1.dtype == torch.int32


def test_the_fixed_length_holds_the_most_documents_that_can_be():
    batch = pack([window([MIN_DOCUMENT], MIN_DOCUMENT - 1)], np.arange(1), "document")
    assert batch.cu_seqlens[-1] == T and (batch.cu_seqlens < T).sum() <= cu_seqlens_length(1, T) - 1


def test_a_target_is_valid_unless_the_next_token_begins_a_document():
    batch = pack([window([20, 40], 3)], np.arange(1), "document")
    ends = batch.tokens_BT1[:, :-1] == 0
    assert torch.equal(valid_targets(batch), ~ends) and ends.any()


def test_window_packing_lets_documents_run_on():
    batch = pack([window([20], 0), window([30], 5)], np.array([8, 9]), "window")
    assert batch.document_BT1 is None and batch.cu_seqlens is None
    assert batch.position_BT.tolist() == [list(range(T))] * 2 and batch.index.tolist() == [8, 9]
    assert valid_targets(batch).all()
