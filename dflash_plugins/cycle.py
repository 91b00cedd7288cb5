"""Is a round worth its time? Arithmetic of cycles and of acceptance (methods.md section 7). Imports no torch.

Times may have any unit as long as all have the same. `accepted` and `emitted` differ by the correction or bonus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


def cycle_speedup(
    baseline_ms: float, draft_ms: float, verify_ms: float, overhead_ms: float, emitted_tokens: float, *, passes: int = 1
) -> float:
    """Tokens per second with drafting over tokens per second without, at a fixed load.

    baseline_ms     one token of plain decoding
    draft_ms        one pass of the drafter; a D-Loop refine round pays it `passes` times
    verify_ms       the target's forward over the block
    overhead_ms     everything else in the round
    emitted_tokens  mean emitted per round, correction or bonus included

    Raises ValueError for a value that is not finite, a negative cost, or nothing to divide by.
    """
    cycle_ms = passes * draft_ms + verify_ms + overhead_ms
    checks = {
        "every input must be finite": all(map(math.isfinite, (baseline_ms, cycle_ms, emitted_tokens))),
        "a token of plain decoding must take time": baseline_ms > 0,
        "a round must emit tokens": emitted_tokens > 0,
        "no cost may be negative": min(draft_ms, verify_ms, overhead_ms) >= 0,
        "at least one pass must be drafted": passes >= 1,
        "a round must take time": cycle_ms > 0,
    }
    broken = [rule for rule, holds in checks.items() if not holds]
    if broken:
        raise ValueError("; ".join(broken))
    return baseline_ms * emitted_tokens / cycle_ms


def expected_emitted(per_slot: Sequence[float]) -> float:
    """Mean emitted per round when slot k is accepted with chance `per_slot[k-1]`, not conditioned on earlier slots.

    Raises ValueError for chances outside 0..1 or growing along the block, which conditional ones may do.
    """
    if any(not 0 <= chance <= 1 for chance in per_slot):
        raise ValueError(f"chances must lie in 0..1: {list(per_slot)}")
    if any(later > earlier for earlier, later in pairwise(per_slot)):
        raise ValueError(f"a slot cannot be accepted more often than the one before it: {list(per_slot)}")
    return 1 + math.fsum(per_slot)


class BestK(NamedTuple):
    """The number of proposals that pays best, and emitted tokens per unit of cost at it."""

    k: int
    ratio: float


def best_k(per_slot: Sequence[float], cost: Callable[[int], float]) -> BestK:
    """K in 1..len(per_slot) with the largest E[emitted] / cost(K); the smallest such K. Needs at least one slot."""
    if not per_slot:
        raise ValueError("no slot to choose from")
    ratios = [BestK(k, expected_emitted(per_slot[:k]) / cost(k)) for k in range(1, len(per_slot) + 1)]
    return max(ratios, key=lambda best: best.ratio)


@dataclass(frozen=True)
class Acceptance:
    """What rounds came to: mean emitted per round, accepted over proposed, acceptance by slot (unconditional)."""

    mean_emitted: float
    rate: float
    by_slot: tuple[float, ...]


def acceptance_by_slot(accepts: Sequence[int], k: int) -> tuple[float, ...]:
    """Share of rounds that accepted slot 1..k: slot s counts wherever at least s proposals were accepted (F37)."""
    if not accepts or k < 1:
        raise ValueError("acceptance needs at least one round and one slot")
    if not all(0 <= accepted <= k for accepted in accepts):
        raise ValueError(f"a round accepts 0..{k} proposals: {sorted(set(accepts) - set(range(k + 1)))}")
    return tuple(sum(accepted >= slot for accepted in accepts) / len(accepts) for slot in range(1, k + 1))


def acceptance(accepts: Sequence[int], k: int) -> Acceptance:
    """Summary of rounds with k proposals each, from the number accepted in each round."""
    by_slot = acceptance_by_slot(accepts, k)
    total, rounds = sum(accepts), len(accepts)
    return Acceptance(mean_emitted=1 + total / rounds, rate=total / (rounds * k), by_slot=by_slot)
