"""Plain-Python oracle of one verification round, by exact enumeration. Imports nothing from the package, nor torch.

Fractions all the way: probabilities are given as fractions (or strings such as "0.3"), results are exact. A round is a
tree: every draw of the drafter, every accept/reject, every resampled token is a branch with its probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

Row = Sequence[Fraction]
Tokens = tuple[int, ...]
Conditional = Callable[[Tokens], Row]
"""A distribution of the next token given the tokens of the block before it."""


def row(*values: object) -> list[Fraction]:
    return [Fraction(str(value)) for value in values]


def accept_min_ratio(p: Row, q: Row, y: int) -> Fraction:
    return min(Fraction(1), p[y] / q[y])


def positive_part(p: Row, q: Row, y: int) -> list[Fraction]:
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    return [value / sum(left) for value in left] if sum(left) else list(p)


def one_hot(size: int, y: int) -> list[Fraction]:
    return [Fraction(int(token == y)) for token in range(size)]


def slot_output(
    p: Row,
    drawn_from: Row,
    believed: Callable[[int], Row],
    accept: Callable[[Row, Row, int], Fraction] = accept_min_ratio,
    residual: Callable[[Row, Row, int], Row] = positive_part,
) -> list[Fraction]:
    """Distribution of the token a single slot emits.

    The drafter draws y from `drawn_from`; verification believes q to be `believed(y)`. They differ in a faulty system.
    """
    out = [Fraction(0)] * len(p)
    for y, chance in enumerate(drawn_from):
        if not chance:
            continue
        q = believed(y)
        kept = accept(p, q, y)
        out[y] += chance * kept
        if kept < 1:
            for token, weight in enumerate(residual(p, q, y)):
                out[token] += chance * (1 - kept) * weight
    return out


def emitted_distribution(p: Conditional, q: Conditional, length: int) -> dict[Tokens, Fraction]:
    """Distribution of the whole emitted tuple of a round with `length` proposals drawn one by one from q."""
    out: dict[Tokens, Fraction] = {}
    for tokens, chance in _round(p, q, length, (), Fraction(1)):
        out[tokens] = out.get(tokens, Fraction(0)) + chance
    return out


def _round(
    p: Conditional, q: Conditional, left: int, prefix: Tokens, weight: Fraction
) -> Iterator[tuple[Tokens, Fraction]]:
    target = p(prefix)
    if left == 0:
        yield from (((*prefix, token), weight * chance) for token, chance in enumerate(target) if chance)
        return
    proposal = q(prefix)
    for y, chance in enumerate(proposal):
        if not chance:
            continue
        kept = accept_min_ratio(target, proposal, y)
        if kept:
            yield from _round(p, q, left - 1, (*prefix, y), weight * chance * kept)
        if kept < 1:
            rest = weight * chance * (1 - kept)
            yield from (
                ((*prefix, token), rest * part) for token, part in enumerate(positive_part(target, proposal, y)) if part
            )


def first_tokens(emitted: dict[Tokens, Fraction], p: Conditional, count: int) -> dict[Tokens, Fraction]:
    """Distribution of the first `count` tokens of the text, continued from p where a round emitted fewer."""
    out: dict[Tokens, Fraction] = {}
    for tokens, chance in emitted.items():
        for text, weight in _continued(tokens[:count], p, count, chance):
            out[text] = out.get(text, Fraction(0)) + weight
    return out


def plain(p: Conditional, count: int) -> dict[Tokens, Fraction]:
    """Distribution of `count` tokens of plain decoding from p."""
    return dict(_continued((), p, count, Fraction(1)))


def _continued(tokens: Tokens, p: Conditional, count: int, weight: Fraction) -> Iterator[tuple[Tokens, Fraction]]:
    if len(tokens) == count:
        yield tokens, weight
        return
    for token, chance in enumerate(p(tokens)):
        if chance:
            yield from _continued((*tokens, token), p, count, weight * chance)


def shared_gumbel_residual(p: Row, q: Row) -> list[Fraction]:
    """F57's fault in closed form: the draft's own race noise decides the residual too.

    Token t finishes the draft's race at E_t / q_t, with independent unit exponentials E_t; the first to finish, y, is
    the proposal. It finishes at w ~ Exp(1), and what is left of every other E_t beyond w q_t is again unit exponential.
    If y is rejected and the same E_t are raced for the residual r (r_y is then 0), candidate t finishes at E_t / r_t:
    it cannot before w q_t / r_t, and has rate r_t from there. Who wins that late race does not depend on y.
    """
    left = positive_part(p, q, 0)
    out = [Fraction(0)] * len(p)
    for y, chance in enumerate(q):
        kept = accept_min_ratio(p, q, y)
        out[y] += chance * kept
        for token, won in _late_race(q, left).items():
            out[token] += chance * (1 - kept) * won
    return out


def _late_race(q: Row, r: Row) -> dict[int, Fraction]:
    """Chance of each token to win the residual race: candidate t starts at w q_t / r_t, w ~ Exp(1), with rate r_t.

    Candidates are sorted by their start per unit of w; between two starts the running ones share the hazard.
    """
    runners = sorted((q[t] / r[t], t) for t in range(len(r)) if r[t])
    won = dict.fromkeys((t for _, t in runners), Fraction(0))
    total_rate, shift = Fraction(0), Fraction(0)
    for position, (start, token) in enumerate(runners):
        total_rate += r[token]
        shift += r[token] * start  # hazard accumulated at time s is total_rate * s - shift * w
        nxt = runners[position + 1][0] if position + 1 < len(runners) else None
        running = [t for _, t in runners[: position + 1]]
        # Chance that the race is decided between start * w and nxt * w, over w ~ Exp(1): survival at time c * w is
        # E[exp(-(total_rate * c - shift) * w)] = 1 / (1 + total_rate * c - shift).
        alive_before = 1 / (1 + total_rate * start - shift)
        alive_after = Fraction(0) if nxt is None else 1 / (1 + total_rate * nxt - shift)
        for t in running:
            won[t] += (alive_before - alive_after) * r[t] / total_rate
    return won


def penalised(logit: float, seen: bool, count: int, repetition: float, presence: float, frequency: float) -> float:
    """One logit after penalties: `seen` in prompt or output, `count` in output."""
    if seen:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - (presence if count else 0.0)
