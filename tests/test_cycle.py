"""Cycle arithmetic: hand-computed values of methods.md section 7 and fault F37."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_plugins.cycle import acceptance, acceptance_by_slot, best_k, cycle_speedup, expected_emitted

PER_SLOT = [0.9, 0.7, 0.4, 0.1, 0.05, 0.01, 0]


def test_best_k_of_the_example():
    best = best_k(PER_SLOT, lambda k: 1 + 0.15 * k)
    assert best.k == 3
    assert best.ratio == pytest.approx(3.0 / 1.45)
    assert round(best.ratio, 3) == 2.069


def test_best_k_takes_the_smaller_of_equals():
    assert best_k([0.5, 0.5], lambda k: 1 + 0.5 * k).k == 1


def test_best_k_needs_a_slot():
    with pytest.raises(ValueError, match="no slot"):
        best_k([], lambda k: 1.0)


def test_expected_emitted_counts_the_correction_or_bonus():
    assert expected_emitted([]) == 1
    assert expected_emitted(PER_SLOT) == pytest.approx(3.16)


def test_conditional_chances_are_refused():
    with pytest.raises(ValueError, match="more often"):
        expected_emitted([0.5, 0.9])
    with pytest.raises(ValueError, match=r"0\.\.1"):
        expected_emitted([1.1])


def test_a_looped_draft_pays_every_pass():
    assert cycle_speedup(10, 3, 12, 1, 4, passes=3) == pytest.approx(40 / 22)


@pytest.mark.parametrize("passes", [0, -1])
def test_no_pass_is_no_draft(passes):
    with pytest.raises(ValueError, match="at least one pass"):
        cycle_speedup(10, 3, 12, 1, 4, passes=passes)


def test_f37_acceptance():
    summary = acceptance([3, 0, 7], 7)
    assert summary.mean_emitted == pytest.approx(13 / 3)
    assert summary.rate == pytest.approx(10 / 21)
    assert summary.by_slot == pytest.approx((2 / 3, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3))


def test_by_slot_agrees_with_expected_emitted():
    accepts = [0, 1, 1, 3, 2]
    assert expected_emitted(acceptance_by_slot(accepts, 4)) == pytest.approx(acceptance(accepts, 4).mean_emitted)


@pytest.mark.parametrize(("accepts", "k"), [([], 3), ([1], 0), ([4], 3), ([-1], 3)])
def test_impossible_rounds_are_refused(accepts, k):
    with pytest.raises(ValueError, match=r"round"):
        acceptance_by_slot(accepts, k)


def test_cycle_and_stopping_import_no_torch():
    code = "import sys, dflash_plugins.cycle, dflash_plugins.stopping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
