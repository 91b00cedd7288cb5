"""Tests and intervals against hand-made tables, textbook figures and plain-loop counting."""

import math
import random
from itertools import permutations

import numpy as np
import pytest

from dflash_plugins.statistics import (
    bin_counts,
    bootstrap_ratio,
    needed_noncentrality,
    ratio_interval,
    smallest_detectable_tv,
    student_quantile,
    two_sample_test,
)


def draw(rng, weights, count):
    return [(token,) for token in rng.choices(range(len(weights)), weights, k=count)]


def test_rare_sequences_are_pooled_with_those_that_share_their_prefix():
    first = [(1, 2)] * 12 + [(1, 3)] * 4 + [(4, 5)] * 3
    second = [(1, 2)] * 10 + [(1, 7)] * 7 + [(6, 6)] * 4
    # (1, 3) and (1, 7) meet in (1,) with 4 + 7; (4, 5) and (6, 6) only in the empty prefix.
    assert bin_counts(first, second).tolist() == [[3, 4, 12], [4, 7, 10]]


def test_statistic_is_pearsons_of_the_table_by_hand():
    # Table [[30, 10], [20, 20]]: every expected count is 25 or 15, sum of 25/25 + 25/15 twice.
    first, second = [(0,)] * 30 + [(1,)] * 10, [(0,)] * 20 + [(1,)] * 20
    result = two_sample_test([(first, second)])
    assert result.statistic == pytest.approx(2 * (25 / 25 + 25 / 15))
    assert result.bins == 2
    assert result.samples == 40
    assert result.total_variation == pytest.approx(0.25)


def test_p_is_that_of_the_exact_hypergeometric_table():
    first, second = [(0,)] * 30 + [(1,)] * 10, [(0,)] * 20 + [(1,)] * 20
    # Fisher: the number of zeros in the first arm given 50 zeros of 80; as extreme as 30 means <= 20 or >= 30.
    chance = {x: math.comb(50, x) * math.comb(30, 40 - x) / math.comb(80, 40) for x in range(10, 41)}
    exact = sum(share for x, share in chance.items() if x <= 20 or x >= 30)
    assert two_sample_test([(first, second)]).p == pytest.approx(exact, rel=0.15)


def test_equal_samples_have_p_one_and_a_single_bin_finds_nothing():
    same = [(1, 2)] * 20 + [(3, 4)] * 20
    assert two_sample_test([(same, same)]).p == 1.0
    assert two_sample_test([([(1,)] * 5, [(2,)] * 5)]).smallest_detectable_tv == 1.0


def test_level_holds_under_the_null():
    rng = random.Random(3)
    weights = [5, 4, 3, 2, 1, 1]
    rejected = sum(
        two_sample_test([(draw(rng, weights, 60), draw(rng, weights, 60))], alpha=0.1, permutations=199).p < 0.1
        for _ in range(300)
    )
    assert rejected < 50  # 30 expected, standard deviation 5.2


def test_a_deviation_of_the_promised_size_is_found_with_the_promised_power():
    rng = random.Random(4)
    per_prompt, alpha = 400, 0.01
    base = [1, 1, 1, 1]
    # Half of the bins gain what the other half loses: the shape with the least noncentrality for its total variation.
    tv = smallest_detectable_tv(per_prompt, 3, alpha=alpha)
    shifted = [1 + 2 * tv, 1 + 2 * tv, 1 - 2 * tv, 1 - 2 * tv]
    found = sum(
        two_sample_test(
            [(draw(rng, base, per_prompt), draw(rng, shifted, per_prompt))], alpha=alpha, permutations=499
        ).p
        < alpha
        for _ in range(100)
    )
    assert found >= 80  # 90 expected, standard deviation 3


def test_a_fault_that_only_shows_in_the_second_token_given_the_first_is_found():
    rng = random.Random(5)
    pairs = [(a, rng.randrange(2)) for a in range(2) for _ in range(200)]
    # Every single token is fair in both arms; in the second arm the tokens always agree.
    agreeing = [(a, a) for a in range(2) for _ in range(200)]
    assert not two_sample_test([(pairs, agreeing)]).passed


def test_prompts_are_never_mixed():
    # Arms swap their answers between prompts: pooled over the prompts there is no difference at all.
    ones, twos = [(1,)] * 50, [(2,)] * 50
    assert not two_sample_test([(ones, twos), (twos, ones)]).passed


def test_refuses_what_cannot_decide():
    with pytest.raises(ValueError, match="both arms"):
        two_sample_test([([(1,)], [])])
    with pytest.raises(ValueError, match="cannot reach"):
        two_sample_test([([(1,)], [(1,)])], permutations=100)


@pytest.mark.parametrize(
    ("degrees", "alpha", "power", "tabulated"),
    [(1, 0.05, 0.8, 7.849), (10, 0.05, 0.8, 16.241), (1, 0.001, 0.9, 20.904)],
)
def test_noncentrality_against_published_tables(degrees, alpha, power, tabulated):
    assert needed_noncentrality(degrees, alpha, power) == pytest.approx(tabulated, rel=0.02)


@pytest.mark.parametrize(
    ("degrees", "tabulated"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (29, 2.045), (30, 2.042)],
)
def test_student_quantiles_against_the_table(degrees, tabulated):
    assert student_quantile(degrees) == pytest.approx(tabulated, abs=6e-4)


def test_ratio_interval_by_hand():
    # Ratios 1, 2, 4: logarithms 0, ln 2, 2 ln 2 with mean ln 2 and deviation ln 2; t of two degrees is 4.3027.
    result = ratio_interval([1.0, 4.0, 12.0], [1.0, 2.0, 3.0])
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert result.median == 2.0
    assert result.low == pytest.approx(2 * math.exp(-half), rel=1e-5)
    assert result.high == pytest.approx(2 * math.exp(half), rel=1e-5)


def test_ratio_interval_pairs_what_was_measured_together():
    # The machine slows down threefold: pairs agree, and the interval does not widen.
    result = ratio_interval([30.0, 10.0, 20.0], [15.0, 5.0, 10.0])
    assert (result.median, result.low, result.high) == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize("bad", [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([], [])])
def test_ratio_interval_refuses(bad):
    with pytest.raises(ValueError, match=r"interval|argument"):
        ratio_interval(*bad)


def test_the_order_of_samples_does_not_matter_to_the_bins():
    rows = [(1, 2), (1, 3), (2, 2)]
    tables = {str(bin_counts([*order] * 5, [*order] * 5).tolist()) for order in permutations(rows)}
    assert len(tables) == 1


def test_bootstrap_of_a_drafter_with_itself_is_exactly_one():
    parts, wholes = [3.0, 9.0, 4.0], [2.0, 5.0, 2.0]
    ratio = bootstrap_ratio(parts, wholes, parts, wholes)
    assert (ratio.median, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_bootstrap_pairs_prompts():
    """Prompts differ far more than drafters do; paired, a gain of a tenth on every prompt is certain."""
    rng = np.random.default_rng(1)
    wholes = rng.integers(20, 60, 300).astype(float)
    base = wholes * rng.uniform(1.1, 3.0, 300)
    ratio = bootstrap_ratio(1.1 * base, wholes, base, wholes)
    assert ratio.median == pytest.approx(1.1)
    assert 1.0999 < ratio.low <= ratio.high < 1.1001


def test_bootstrap_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(2)
    inside = 0
    for trial in range(200):
        wholes = np.full(100, 50.0)
        first, second = (rng.normal(100, 10, 100) for _ in range(2))
        ratio = bootstrap_ratio(first, wholes, second, wholes, draws=1000, seed=trial)
        inside += ratio.low <= 1.0 <= ratio.high
    assert 180 <= inside <= 199


def test_bootstrap_needs_prompts():
    with pytest.raises(ValueError, match="needs prompts"):
        bootstrap_ratio([], [], [], [])
