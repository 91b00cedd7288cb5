"""Tests and intervals of the commands: what is decided before the data is seen, and what the data could have shown.

Two-sample test. Samples of one prompt are short token sequences; both arms of a prompt are pooled into the same bins,
which depend on the pooled sample only, so that under the null hypothesis the arms are exchangeable and a permutation
test is exact whatever the bins are. The statistic is Pearson's, summed over prompts: it is large for any difference,
not only for one that was foreseen. Sequences, not single tokens, are binned: a fault of a later slot shows only
together with the slots before it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALPHA = 1e-3
"""Chance of calling a lossless engine lossy, fixed before any sample is drawn."""
POWER = 0.9
"""Chance with which a deviation of ``smallest_detectable_tv`` is found."""
PERMUTATIONS = 19_999
LEAST_IN_BIN = 10
LEAST_SHARE = 0.04

Tokens = tuple[int, ...]


class TwoSampleTest(BaseModel):
    """Outcome of the test. ``samples`` counts one arm; both total variations are means over the prompts.

    ``smallest_detectable_tv`` bounds below what the test finds with chance ``power``: every deviation of the binned
    distributions by at least that much. ``total_variation`` is what was seen and is positive even without any
    deviation.
    """

    model_config = ConfigDict(frozen=True)

    statistic: float
    p: float
    samples: int
    smallest_detectable_tv: float
    total_variation: float
    bins: int
    alpha: float
    power: float

    @property
    def passed(self) -> bool:
        """Whether the arms may come from one distribution."""
        return self.p >= self.alpha


class Ratio(BaseModel):
    """Median of paired ratios and a 95 % interval of their geometric mean."""

    model_config = ConfigDict(frozen=True)

    median: float
    low: float
    high: float


def two_sample_test(
    pairs: Sequence[tuple[Sequence[Tokens], Sequence[Tokens]]],
    *,
    alpha: float = ALPHA,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> TwoSampleTest:
    """Test whether both samples of every pair (one pair per prompt) come from one distribution.

    Raises ValueError without pairs, with an empty sample, or with fewer permutations than ``alpha`` needs.
    """
    import numpy as np

    if not pairs or any(not a or not b for a, b in pairs):
        raise ValueError("every prompt needs samples of both arms")
    if (permutations + 1) * alpha < 1:
        raise ValueError(f"{permutations} permutations cannot reach p < {alpha}")
    rng = np.random.default_rng(seed)
    tables = [bin_counts(a, b) for a, b in pairs]
    observed = sum(float(_pearson(table[:1], table.sum(0))[0]) for table in tables)
    null = np.zeros(permutations)
    for table in tables:
        total = table.sum(0)
        null += _pearson(rng.multivariate_hypergeometric(total, int(table[0].sum()), permutations), total)
    # A relative hair keeps equal statistics equal when their sums were rounded differently.
    at_least = int((null >= observed * (1 - 1e-12)).sum())
    bins = sum(table.shape[1] for table in tables)
    samples = sum(len(a) for a, _ in pairs)
    return TwoSampleTest(
        statistic=observed,
        p=(1 + at_least) / (1 + permutations),
        samples=samples,
        smallest_detectable_tv=smallest_detectable_tv(samples, bins - len(pairs), alpha),
        total_variation=statistics.fmean(_total_variation(table) for table in tables),
        bins=bins,
        alpha=alpha,
        power=POWER,
    )


def bin_counts(first: Sequence[Tokens], second: Sequence[Tokens]) -> NDArray[np.int64]:
    """Counts [2, bins] of both samples. Rare sequences are pooled with those that share their longest prefix."""
    import numpy as np

    labels = _labels([*first, *second])
    order = {label: column for column, label in enumerate(sorted(set(labels)))}
    table = np.zeros((2, len(order)), dtype=np.int64)
    for index, label in enumerate(labels):
        table[int(index >= len(first)), order[label]] += 1
    return table


def _labels(sequences: Sequence[Tokens]) -> list[Tokens]:
    """Bin of each sequence: itself when frequent, else ever shorter prefixes; the empty one takes the rest."""
    least = max(LEAST_IN_BIN, math.ceil(LEAST_SHARE * len(sequences)))
    labels = [tuple(sequence) for sequence in sequences]
    for length in range(max(map(len, labels)), 0, -1):
        counts = Counter(label for label in labels if len(label) == length)
        labels = [label[:-1] if len(label) == length and counts[label] < least else label for label in labels]
    return labels


def _pearson(first: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.float64]:
    """Pearson's statistic of rows [P, bins] of first-arm counts, given the counts [bins] of both arms together."""
    share = first.sum(1, keepdims=True) / total.sum()
    deviation = (first - total * share) ** 2 / total
    result: NDArray[np.float64] = (deviation / (share * (1 - share))).sum(1)
    return result


def _total_variation(table: NDArray[np.int64]) -> float:
    shares = table / table.sum(1, keepdims=True)
    return float(abs(shares[0] - shares[1]).sum() / 2)


def smallest_detectable_tv(samples: int, degrees: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """Total variation that is found with chance ``power`` whatever its shape; 1.0 when nothing can be found.

    With n samples per arm and prompt the noncentrality is n/2 * sum (p-q)^2/((p+q)/2) >= 2 n TV^2 (Cauchy-Schwarz), and
    by convexity at least 2 * ``samples`` * (mean TV over prompts)^2.
    """
    if degrees < 1:
        return 1.0
    return min(1.0, math.sqrt(needed_noncentrality(degrees, alpha, power) / (2 * samples)))


@cache
def needed_noncentrality(degrees: int, alpha: float, power: float) -> float:
    """Noncentrality at which a chi-square test of level ``alpha`` rejects with chance ``power`` (simulated, 2 %)."""
    import numpy as np

    rng = np.random.default_rng(0)
    draws = 400_000
    critical = float(np.quantile(rng.chisquare(degrees, draws), 1 - alpha))
    rest = rng.chisquare(degrees - 1, draws) if degrees > 1 else np.zeros(draws)
    normal = rng.standard_normal(draws)
    low, high = 0.0, 4.0 * (critical + 30)
    for _ in range(40):
        middle = (low + high) / 2
        rejected = float(((normal + math.sqrt(middle)) ** 2 + rest > critical).mean())
        low, high = (middle, high) if rejected < power else (low, middle)
    return high


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median of the paired ratios, and Student's 95 % interval on their logarithms.

    Pairs are measured side by side, so that what slows the machine down slows both. Raises ValueError for fewer than
    two pairs, lists of different lengths, or numbers that are not positive.
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True) if a > 0 and b > 0]
    if len(ratios) < 2 or len(ratios) != len(numerators):
        raise ValueError("an interval needs at least two pairs of positive numbers")
    logs = [math.log(r) for r in ratios]
    half = student_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    centre = statistics.fmean(logs)
    return Ratio(median=statistics.median(ratios), low=math.exp(centre - half), high=math.exp(centre + half))


def bootstrap_ratio(
    first_parts: Sequence[float],
    first_wholes: Sequence[float],
    second_parts: Sequence[float],
    second_wholes: Sequence[float],
    *,
    draws: int = 10_000,
    seed: int = 0,
) -> Ratio:
    """(sum of first parts / sum of first wholes) / (the same of the second), with a 95 % interval.

    Entry i of all four belongs to the same prompt; the interval is that of prompts drawn again with replacement, the
    same ones for both (percentiles 2.5 and 97.5). ``median`` is the ratio itself. Raises ValueError for no prompts.
    """
    import numpy as np

    columns = np.array([first_parts, first_wholes, second_parts, second_wholes], dtype=np.float64)
    if columns.ndim != 2 or not columns.shape[1]:
        raise ValueError("an interval needs prompts, and the same ones for both")
    counts = np.random.default_rng(seed).multinomial(columns.shape[1], [1 / columns.shape[1]] * columns.shape[1], draws)
    a, b, c, d = columns @ counts.T
    low, high = np.percentile((a / b) / (c / d), [2.5, 97.5])
    whole = columns.sum(axis=1)
    return Ratio(median=float(whole[0] / whole[1] / (whole[2] / whole[3])), low=float(low), high=float(high))


def student_quantile(degrees: int, coverage: float = 0.95) -> float:
    """Half width t with P(|T| <= t) = ``coverage`` for Student's T with whole ``degrees`` of freedom."""
    if degrees < 1:
        raise ValueError("Student's distribution needs at least one degree of freedom")
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_inside(middle, degrees) < coverage else (low, middle)
    return high


def _student_inside(t: float, degrees: int) -> float:
    """P(|T| <= t), the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(theta)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for j in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (j + 1) / (j + 2)
    if odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total
