import itertools

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_plugins.config import SelectorConfig
from dflash_plugins.methods.base import choose_by_argmax
from dflash_plugins.selector import CandidateSelector, candidates, choose_by_uniforms, walk

NEW, LOS, YORK, ANGELES = range(4)


def drawn(temperature, *uniforms):
    return choose_by_uniforms(torch.tensor([temperature]), torch.tensor([uniforms]))


def a_selector(vocab=4, rank=4, hidden=4, top_k=2):
    """W is the identity and h all ones, so a pair scores < A[a], B[b] >."""
    selector = CandidateSelector(hidden, vocab, SelectorConfig(top_k=top_k, rank=rank)).requires_grad_(False)
    selector.hidden_projection.weight.copy_(torch.eye(rank, hidden))
    selector.predecessor_codebook.copy_(torch.eye(vocab, rank))
    selector.successor_codebook.zero_()
    return selector


def the_two_slots():
    """Each slot's own best joins into "New Angeles"."""
    ids = torch.tensor([[[NEW, LOS], [ANGELES, YORK]]])
    unary = torch.tensor([[[2.0, 1.0], [2.0, 1.5]]])
    return torch.ones(1, 2, 4), ids, unary


def test_without_pair_scores_each_slot_keeps_its_own_best():
    walked = walk(a_selector(), *the_two_slots(), torch.tensor([0]), choose_by_argmax)
    assert walked.ids.tolist() == [[NEW, ANGELES]]


def test_a_pair_score_makes_it_new_york():
    selector = a_selector()
    selector.successor_codebook[YORK, NEW] = 1.0  # < A[New] * h, B[York] > = 1
    walked = walk(selector, *the_two_slots(), torch.tensor([0]), choose_by_argmax)
    assert walked.ids.tolist() == [[NEW, YORK]]
    assert walked.rows is None
    drawn_greedily = walk(selector, *the_two_slots(), torch.tensor([0]), drawn(0.0, 0.9, 0.1))
    assert drawn_greedily.ids.tolist() == [[NEW, YORK]]
    assert drawn_greedily.rows.tolist() == [[[1.0, 0.0], [0.0, 1.0]]]


def test_it_is_a_walk_and_not_the_best_path():
    """Los Angeles would score 1 + 9, but the walk has already gone to New."""
    selector = a_selector()
    selector.successor_codebook[ANGELES, LOS] = 9.0
    selector.successor_codebook[YORK, NEW] = 1.0
    walked = walk(selector, *the_two_slots(), torch.tensor([0]), choose_by_argmax)
    assert walked.ids.tolist() == [[NEW, YORK]]


def test_the_anchor_is_the_first_predecessor():
    selector = a_selector()
    selector.successor_codebook[LOS, ANGELES] = 5.0  # after the anchor "Angeles", "Los" gains 5
    walked = walk(selector, *the_two_slots(), torch.tensor([ANGELES]), choose_by_argmax)
    assert walked.ids[0, 0] == LOS


def test_the_slots_hidden_state_turns_the_pair_score():
    selector = a_selector()
    selector.successor_codebook[YORK, NEW] = 1.0
    hidden, ids, unary = the_two_slots()
    hidden[0, 1] = 0.0
    walked = walk(selector, hidden, ids, unary, torch.tensor([0]), choose_by_argmax)
    assert walked.ids.tolist() == [[NEW, ANGELES]]


def test_sampled_walk_reports_the_row_it_drew_from():
    """All pairs of draws on a grid: the realised q equals softmax of the scores along the path that was taken."""
    selector = a_selector()
    selector.successor_codebook[YORK, NEW] = 1.0
    hidden, ids, unary = the_two_slots()
    first = oracle.softmax([2.0 / 0.5, 1.0 / 0.5])
    second = {NEW: oracle.softmax([2.0 / 0.5, 2.5 / 0.5]), LOS: oracle.softmax([2.0 / 0.5, 1.5 / 0.5])}
    for u, v in itertools.product([0.0, 0.5, 0.95], repeat=2):
        walked = walk(selector, hidden, ids, unary, torch.tensor([0]), drawn(0.5, u, v))
        came = [NEW, LOS][oracle.invert(first, u)]
        assert walked.ids.tolist() == [[came, [ANGELES, YORK][oracle.invert(second[came], v)]]]
        assert walked.rows[0, 0].tolist() == pytest.approx(first)
        assert walked.rows[0, 1].tolist() == pytest.approx(second[came])


def test_candidates_are_the_best_logits_best_first():
    values, ids = candidates(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 3)
    assert (values.tolist(), ids.tolist()) == ([[3.0, 2.0, 1.0]], [[1, 3, 2]])
    assert candidates(torch.zeros(1, 2), 16)[1].shape == (1, 2)


@given(st.lists(st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 3.0]), min_size=1, max_size=40), st.integers(1, 8))
def test_of_equal_logits_the_lower_ids_are_candidates(logits, top_k):
    values, ids = candidates(torch.tensor([logits]), top_k)
    expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    assert ids.tolist() == [expected]
    assert values.tolist() == [[logits[i] for i in expected]]


def test_bf16_logits_keep_their_dtype_and_order():
    values, ids = candidates(torch.tensor([[1.0, 2.0, 2.0, -3.0]], dtype=torch.bfloat16), 2)
    assert (values.dtype, ids.tolist()) == (torch.bfloat16, [[1, 2]])


def test_temperature_zero_rows_stay_greedy_beside_sampled_ones():
    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    choice = choose_by_uniforms(torch.tensor([0.0, 1.0]), torch.tensor([[0.1], [0.1]]))(scores[:, None], 0)
    assert choice.index.tolist() == [[1], [0]]
    assert choice.rows[0].tolist() == [[0.0, 1.0]]
    assert choice.rows[1, 0].tolist() == pytest.approx(oracle.softmax([0.0, 1.0]))


def test_a_later_slot_uses_its_own_uniform():
    scores = torch.zeros(1, 1, 2)
    assert [drawn(1.0, 0.1, 0.9)(scores, slot).index.item() for slot in (0, 1)] == [0, 1]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=6),
    st.floats(0.1, 3),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_a_draw_inverts_the_cumulative_sum(scores, temperature, uniform):
    choice = drawn(temperature, uniform)(torch.tensor([[scores]]), 0)
    index, probs = choice.index[0, 0], choice.rows[0]
    assert probs[0, index].item() > 0
    below = probs[0, : int(index)].double().sum().item()
    assert below <= uniform + 1e-6
    assert uniform < below + probs[0, index].item() + 1e-6


def test_a_token_without_mass_is_never_drawn():
    scores = torch.tensor([[[0.0, -torch.inf, 0.0, -torch.inf]]])
    for uniform in (0.0, 0.25, 0.499, 0.5, 0.999, 0.99999994):
        assert drawn(1.0, uniform)(scores, 0).index.item() in (0, 2)


def test_shapes_never_depend_on_values():
    with FakeTensorMode():
        selector = CandidateSelector(4, 9, SelectorConfig(top_k=3, rank=2))
        unary, ids = candidates(torch.empty(2, 5, 9), 3)
        choose = choose_by_uniforms(torch.empty(2), torch.empty(2, 5))
        walked = walk(selector, torch.empty(2, 5, 4), ids, unary, ids[:, 0, 0], choose)
        assert walked.ids.shape == (2, 5)
        assert walked.rows.shape == (2, 5, 3)
