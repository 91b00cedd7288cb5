"""Where the emitted tokens of a round are cut: end of text, stop ids and strings, max_tokens, min_tokens.

Nothing is emitted after the cut, and only what is kept may be committed (methods.md section 1). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

Reason = Literal["stop", "length"]


def cut_emitted(
    emitted: Sequence[int],
    *,
    max_new: int,
    eos_ids: Collection[int] | int | None = (),
    stop_ids: Collection[int] = (),
    ignore_eos: bool = False,
    min_new: int = 0,
    stop_strings: Collection[str] = (),
    text_after: Callable[[int], str] | None = None,
) -> tuple[list[int], Reason | None]:
    """`(kept, reason)`: the leading tokens that count, and why the request ends with them (None: it goes on).

    max_new       tokens the request may still emit, this round included
    eos_ids       one id or several, each of which ends the text unless `ignore_eos` (F64, F69)
    stop_ids      ids that end it in any case
    min_new       tokens that must be emitted first; a stop among them does not count
    text_after    the request's text after the first i tokens of this round, i = 1.. ; needed for `stop_strings`

    The stopping token is kept. Where a stop and the budget fall on one token, the reason is "stop".
    Raises ValueError for stop strings without `text_after`.
    """
    if stop_strings and text_after is None:
        raise ValueError("stop strings need text_after to see the text")
    ends = set(stop_ids) | (set() if ignore_eos else _as_set(eos_ids))
    for count, token in enumerate(emitted[: max(max_new, 0)], start=1):
        if count > min_new and (token in ends or _holds(stop_strings, text_after, count)):
            return list(emitted[:count]), "stop"
    if len(emitted) >= max_new:
        return list(emitted[: max(max_new, 0)]), "length"
    return list(emitted), None


def cut_proposals(lengths: Sequence[int], remaining: Sequence[int]) -> list[int]:
    """Proposals worth verifying when request i may emit `remaining[i]` more tokens: at most remaining - 1, at least 0.

    The last emitted token is always the target's own. The block still has its K masks: cutting happens after drafting
    (F64). `Proposals.cut` does the same to tensors.
    """
    return [max(0, min(length, left - 1)) for length, left in zip(lengths, remaining, strict=True)]


def _as_set(ids: Collection[int] | int | None) -> set[int]:
    return {ids} if isinstance(ids, int) else set(ids or ())


def _holds(strings: Collection[str], text_after: Callable[[int], str] | None, count: int) -> bool:
    if not strings or text_after is None:
        return False
    text = text_after(count)
    return any(string in text for string in strings)
