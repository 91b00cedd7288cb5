"""Whether two greedy texts are the same, and what a difference means.

Speculation computes a row together with others that plain decoding computes alone, and floating-point sums depend on
how rows are batched. Where the target's two best tokens are as close as that rounding, both texts are right. So a
difference is judged by the gap: how far, at the first position that differs, the worse of the two tokens lies below the
target's best one, in raw logits that the plain engine computes again for the common prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dflash_plugins.driver import Completion, EngineSession, Sampling

Verdict = Literal["tie", "numerical", "FAIL"]

RESCORED_LOGITS = 20
MANTISSA_BITS = {"bfloat16": 7, "float16": 10}
# In bfloat16 the gap between the two best logits of a row was seen to differ between computing it alone and among
# others by a median of 1/2 unit in the last place of the best logit, 95 % up to 2, 99 % up to 3.5 (SmolLM2-135M, 360
# positions). Small logits carry the rounding of larger sums, hence the floor. The cap keeps a gap that nobody would
# call a rounding (e^0.5: 1.65 times as likely) a FAIL. In float32 the same gaps differed by at most 5e-5.
NUMERICAL_ULPS = 3
LEAST_LOGIT = 8.0
LARGEST_GAP = 0.5
FLOAT32_GAP = 1e-3


class Difference(BaseModel):
    """First position at which a prompt's texts differ. ``gap`` is None when one text merely ended before the other."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    position: int
    plain_id: int | None
    speculative_id: int | None
    gap: float | None
    bound: float
    verdict: Verdict


def numerical_bound(best_logit: float, dtype: str) -> float:
    """Largest gap, in logits, that rounding in ``dtype`` explains."""
    if (bits := MANTISSA_BITS.get(dtype)) is None:
        return FLOAT32_GAP
    exponent = math.floor(math.log2(max(abs(best_logit), LEAST_LOGIT)))
    return min(NUMERICAL_ULPS * 2.0 ** (exponent - bits), LARGEST_GAP)


def judge(gap: float | None, bound: float) -> Verdict:
    """Name of a difference with this gap; a text that ended early has none and fails."""
    if gap is None:
        return "FAIL"
    if gap == 0.0:
        return "tie"
    return "numerical" if gap <= bound else "FAIL"


def first_difference(plain: Completion, speculative: Completion) -> int | None:
    """Index of the first token that differs, or at which only one of the texts ended; None for the same text."""
    for position, (a, b) in enumerate(zip(plain.ids, speculative.ids, strict=False)):
        if a != b:
            return position
    same = len(plain.ids) == len(speculative.ids) and plain.finish_reason == speculative.finish_reason
    return None if same else min(len(plain.ids), len(speculative.ids))


def compared_tokens(plain: Completion, speculative: Completion) -> int:
    """Tokens whose identity was decided: all, or those up to and with the first difference."""
    position = first_difference(plain, speculative)
    return len(plain.ids) if position is None else min(position + 1, max(len(plain.ids), len(speculative.ids)))


def differences(
    session: EngineSession,
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Completion],
    speculative: Sequence[Completion],
    dtype: str,
) -> tuple[Difference, ...]:
    """First difference of every prompt that has one, judged by the plain engine ``session``."""
    rows = zip(names, prompts, plain, speculative, strict=True)
    found = [(*row, position) for row in rows if (position := first_difference(row[2], row[3])) is not None]
    if not found:
        return ()
    prefixes = [[*prompt, *a.ids[:position]] for _, prompt, a, _, position in found]
    scored = session.generate(prefixes, Sampling(max_tokens=1, ignore_eos=True, logits=RESCORED_LOGITS))
    return tuple(
        _difference(name, position, a, b, best, dtype)
        for (name, _, a, b, position), best in zip(found, scored.completions, strict=True)
    )


def _difference(
    name: str, position: int, plain: Completion, speculative: Completion, scored: Completion, dtype: str
) -> Difference:
    assert scored.logits is not None
    best = scored.logits[0]
    pair = [row.ids[position] if position < len(row.ids) else None for row in (plain, speculative)]
    gap = None if None in pair else max(_below_best(token, best) for token in pair)
    bound = numerical_bound(best[0][1], dtype)
    return Difference(
        prompt=name,
        position=position,
        plain_id=pair[0],
        speculative_id=pair[1],
        gap=gap,
        bound=bound,
        verdict=judge(gap, bound),
    )


def _below_best(token: int | None, best: Sequence[tuple[int, float]]) -> float:
    """How far a token lies below the best one; one that is not listed lies at least as far as the last that is."""
    logits = dict(best)
    return best[0][1] - logits.get(token, best[-1][1]) if token is not None else math.inf
