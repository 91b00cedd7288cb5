import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_plugins.layout import (
    block_input_ids,
    block_positions,
    layer_visibility,
    serving_mask,
    training_mask,
    training_positions,
)


def test_block_is_anchor_then_masks_at_n_minus_1_and_after():
    assert block_input_ids(torch.tensor([7, 8]), 99, 3).tolist() == [[7, 99, 99, 99], [8, 99, 99, 99]]
    assert block_positions(torch.tensor([4, 0]), 3).tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_prefix_replaces_the_first_masks_and_keeps_the_width():
    ids = block_input_ids(torch.tensor([7]), 99, 4, torch.tensor([[1, 2]]))
    assert ids.tolist() == [[7, 1, 2, 99, 99]]


@pytest.mark.parametrize(
    ("causal", "rows"), [(False, [7 / 3, 7 / 3, 7 / 3]), (True, [1.0, 1.5, 7 / 3])]
)  # F15: V rows 1, 2, 4 under uniform scores
def test_block_of_three_averages_what_it_sees(causal, rows):
    positions = torch.arange(3)
    seen = layer_visibility(positions, positions, causal=causal, window=None)
    scores = torch.zeros(3, 3).masked_fill(~seen, -torch.inf)
    assert (torch.softmax(scores, -1) @ torch.tensor([1.0, 2.0, 4.0])).tolist() == pytest.approx(rows)


def test_windows_count_from_each_query():
    """Block 4, window 6, prefix 10: queries 10..13 see context from 5, 6, 7, 8 on."""
    seen = layer_visibility(torch.arange(10, 14), torch.arange(14), causal=False, window=6)
    assert [row.nonzero()[0].item() for row in seen] == [5, 6, 7, 8]
    assert seen[:, 10:].all()


def test_a_window_also_looks_ahead_unless_causal():
    # hand-written: window 2, four rows
    both = layer_visibility(torch.arange(4), torch.arange(4), causal=False, window=2).int().tolist()
    assert both == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    back = layer_visibility(torch.arange(4), torch.arange(4), causal=True, window=2).int().tolist()
    assert back == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.booleans(),
    st.none() | st.integers(1, 8),
)
def test_visibility_equals_the_loop(queries, keys, causal, window):
    got = layer_visibility(torch.tensor(queries), torch.tensor(keys), causal=causal, window=window).tolist()
    assert got == [[oracle.sees(i, j, causal, window) for j in keys] for i in queries]


def test_serving_rows_see_their_real_context_before_the_anchor():
    mask = serving_mask(
        torch.tensor([[2, 3], [3, 4]]), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]), torch.tensor([2, 4])
    ).int()
    # row 0: two real columns; row 1: four real columns, but the one at the anchor's own position is not context
    assert mask.tolist() == [[[1, 1, 0, 0, 1, 1]] * 2, [[1, 1, 1, 0, 1, 1]] * 2]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 10), st.integers(1, 4))
def test_training_mask_equals_the_loop(anchors, num_context, block):
    got = training_mask(torch.tensor(anchors), num_context, block).tolist()
    rows = range(len(anchors) * block)
    assert got == [oracle.training_row(anchors, num_context, block, query) for query in rows]


def test_training_mask_by_hand():
    mask = training_mask(torch.tensor([1, 3]), 3, 2).int().tolist()
    assert mask == [[1, 0, 0, 1, 1, 0, 0]] * 2 + [[1, 1, 1, 0, 0, 1, 1]] * 2
    assert training_positions(torch.tensor([1, 3]), 2).tolist() == [1, 2, 3, 4]


def test_training_mask_takes_batches():
    anchors = torch.tensor([[1, 3], [2, 2]])
    both = training_mask(anchors, 3, 2)
    assert both.shape == (2, 4, 7)
    assert torch.equal(both[0], training_mask(anchors[0], 3, 2))
    assert torch.equal(both[1], training_mask(anchors[1], 3, 2))
