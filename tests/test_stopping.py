"""Cuts of emitted tokens and of proposals: F64, F69 and their neighbours, by hand."""

from __future__ import annotations

import pytest
import torch

from dflash_plugins.proposals import Proposals
from dflash_plugins.stopping import cut_emitted, cut_proposals

EOS = 2


@pytest.mark.parametrize(
    ("emitted", "kept"),
    [
        ([5, 7, EOS, 9], [5, 7, EOS]),
        ([5, 7, 9, EOS], [5, 7, 9, EOS]),  # as bonus
        ([EOS, 7, 9, 5], [EOS]),
        ([EOS], [EOS]),
        ([5, EOS, EOS], [5, EOS]),
    ],
)
def test_f64_end_of_text_cuts(emitted, kept):
    assert cut_emitted(emitted, max_new=100, eos_ids=EOS) == (kept, "stop")


def test_f64_ignored_end_of_text_goes_on():
    assert cut_emitted([5, EOS, 9], max_new=100, eos_ids=EOS, ignore_eos=True) == ([5, EOS, 9], None)


def test_ignore_eos_keeps_stop_ids():
    assert cut_emitted([5, EOS, 9, 4], max_new=100, eos_ids=EOS, stop_ids={9}, ignore_eos=True) == ([5, EOS, 9], "stop")


def test_f64_budget_of_six_in_rounds_of_four():
    text, reason = [], None
    for block in ([10, 11, 12, 13], [14, 15, 16, 17]):
        assert reason is None
        kept, reason = cut_emitted(block, max_new=6 - len(text), eos_ids=EOS)
        text += kept
    assert (text, reason) == ([10, 11, 12, 13, 14, 15], "length")


def test_budget_reached_exactly():
    assert cut_emitted([5, 6], max_new=2) == ([5, 6], "length")
    assert cut_emitted([5, 6], max_new=3) == ([5, 6], None)


@pytest.mark.parametrize("left", [0, -1])
def test_no_budget_keeps_nothing(left):
    assert cut_emitted([5, 6], max_new=left) == ([], "length")


def test_end_of_text_on_the_last_budgeted_token_is_a_stop():
    assert cut_emitted([5, EOS, 7], max_new=2, eos_ids=EOS) == ([5, EOS], "stop")


def test_end_of_text_beyond_the_budget_is_not_seen():
    assert cut_emitted([5, 6, EOS], max_new=2, eos_ids=EOS) == ([5, 6], "length")


@pytest.mark.parametrize("end", [248046, 248044])
def test_f69_each_of_several_ids_ends(end):
    assert cut_emitted([5, end, 7], max_new=9, eos_ids=[248046, 248044]) == ([5, end], "stop")


def test_min_tokens_hold_the_stop_back():
    assert cut_emitted([EOS, 5, EOS, 6], max_new=9, eos_ids=EOS, min_new=2) == ([EOS, 5, EOS], "stop")
    assert cut_emitted([EOS, 5], max_new=9, eos_ids=EOS, min_new=2) == ([EOS, 5], None)
    assert cut_emitted([5, 9, 6], max_new=9, stop_ids=[9], min_new=1) == ([5, 9], "stop")
    assert cut_emitted([5, EOS, 6], max_new=9, eos_ids=EOS, min_new=2) == ([5, EOS, 6], None)  # only one came before


def test_stop_string_across_tokens_keeps_the_token_that_completes_it():
    words = {1: "a", 2: "\nQ", 3: ":", 4: "b"}
    emitted = [1, 2, 3, 4]

    def text_after(count):
        return "before " + "".join(words[token] for token in emitted[:count])

    assert cut_emitted(emitted, max_new=9, stop_strings=["\nQ:"], text_after=text_after) == ([1, 2, 3], "stop")
    assert cut_emitted(emitted, max_new=9, stop_strings=["zzz"], text_after=text_after) == (emitted, None)


def test_stop_strings_need_the_text():
    with pytest.raises(ValueError, match="text_after"):
        cut_emitted([1], max_new=9, stop_strings=["x"])


def test_f64_proposals_beyond_the_budget_are_cut():
    assert cut_proposals([7, 7, 7, 3, 7], [100, 3, 1, 8, 0]) == [7, 2, 0, 3, 0]


def test_tensor_cut_agrees_and_leaves_the_block_width():
    cut = Proposals.of(torch.arange(35).view(5, 7), lengths=torch.tensor([7, 7, 7, 3, 7]))
    cut = cut.cut(torch.tensor([100, 3, 1, 8, 0]) - 1)
    assert cut.lengths.tolist() == [7, 2, 0, 3, 0]
    assert cut.num_slots == 7
    assert cut.lists() == [[0, 1, 2, 3, 4, 5, 6], [7, 8], [], [21, 22, 23], []]
