"""The two snippets of the reference document, in our code: their asserted values and their refusals."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_plugins.cycle import cycle_speedup
from dflash_plugins.proposals import Proposals
from dflash_plugins.verify import verify_greedy, verify_greedy_block


def test_block_of_the_document():
    assert verify_greedy_block([10, 20, 99, 40], [10, 20, 30, 40, 50]) == ([10, 20, 30], 2)


def test_block_of_the_document_as_tensors():
    verdict = verify_greedy(Proposals.of(torch.tensor([[10, 20, 99, 40]])), torch.tensor([[10, 20, 30, 40, 50]]))
    assert (verdict.lists(), verdict.accepted.tolist()) == ([[10, 20, 30]], [2])


def test_whole_block_gets_the_bonus():
    assert verify_greedy_block([10, 20], [10, 20, 30]) == ([10, 20, 30], 2)


def test_accepted_end_of_text_ends_the_block_without_bonus():
    assert verify_greedy_block([10, 2, 20], [10, 2, 20, 30], eos_token=2) == ([10, 2], 2)
    assert verify_greedy_block([10, 20], [10, 20, 30], eos_token=20) == ([10, 20], 2)


def test_end_of_text_id_zero_is_an_id():
    assert verify_greedy_block([0, 7], [0, 7, 8], eos_token=0) == ([0], 1)


def test_rejected_end_of_text_is_no_end():
    assert verify_greedy_block([2, 20], [10, 20, 30], eos_token=2) == ([10], 0)


def test_empty_draft_emits_the_targets_token():
    assert verify_greedy_block([], [5]) == ([5], 0)


@pytest.mark.parametrize("choices", [[], [10], [10, 20], [10, 20, 30, 40]])
def test_wrong_number_of_target_choices(choices):
    with pytest.raises(ValueError, match="target choices"):
        verify_greedy_block([10, 20], choices)


def test_speedups_of_the_document():
    assert cycle_speedup(10, 3, 12, 1, 4) == 2.5
    assert cycle_speedup(10, 3, 12, 1, 1) == 0.625


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_every_input_must_be_finite(position, bad):
    values = [10, 3, 12, 1, 4]
    values[position] = bad
    with pytest.raises(ValueError, match="finite"):
        cycle_speedup(*values)


@pytest.mark.parametrize(("position", "bad"), [(0, 0), (0, -1), (4, 0), (4, -2), (1, -1), (2, -1), (3, -1)])
def test_baseline_and_emitted_positive_costs_not_negative(position, bad):
    values = [10, 3, 12, 1, 4]
    values[position] = bad
    with pytest.raises(ValueError, match=r"must|may be negative"):
        cycle_speedup(*values)


def test_negative_cost_is_refused_even_if_the_round_takes_time():
    with pytest.raises(ValueError, match="negative"):
        cycle_speedup(10, 3, 12, -1, 4)


def test_a_free_round_is_refused():
    with pytest.raises(ValueError, match="take time"):
        cycle_speedup(10, 0, 0, 0, 4)
