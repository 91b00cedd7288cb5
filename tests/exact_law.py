"""The law of sampled texts, from a target's logits by hand; bins of texts; Pearson's test. Imports nothing of ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from oracle_sampling import penalised
from torch import Tensor

Text = tuple[Any, ...]
Logits = Callable[[list[list[int]]], Tensor]
"""Logits [N, V] after each of N equally long texts."""
Law = Callable[[Sequence[float], Sequence[int], Sequence[int], dict[str, Any]], Tensor]
"""Probabilities [V] of the next token from logits, prompt, output and sampling parameters."""
REST = None
"""Last entry of a bin that holds all rarer continuations of what stands before it."""


def next_token(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], rule: dict[str, Any]) -> Tensor:
    """Probabilities [V] of the next token under the sampling parameters ``rule``, named as vLLM names them."""
    count, seen = Counter(output), {*prompt, *output}
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = [rule.get(name, neutral) for name, neutral in zip(names, (1.0, 0.0, 0.0), strict=True)]
    scores = [penalised(float(x), t in seen, count[t], *penalties) for t, x in enumerate(logits)]
    if len(output) < rule.get("min_tokens", 0):
        scores = [-math.inf if t in rule["stop_token_ids"] else x for t, x in enumerate(scores)]
    probs = softmax([x / rule.get("temperature", 1.0) for x in scores])
    best = sorted(range(len(probs)), key=lambda t: -probs[t])
    kept = best[: rule.get("top_k", len(probs))]
    whole, before, nucleus = sum(probs[t] for t in kept), 0.0, []
    for token in kept:
        if before < rule.get("top_p", 1.0) * whole:
            nucleus.append(token)
        before += probs[token]
    out = torch.zeros(len(probs), dtype=torch.float64)
    for token in nucleus:
        out[token] = probs[token] / sum(probs[t] for t in nucleus)
    return out


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(x - top) for x in scores]
    return [w / sum(weights) for w in weights]


def bins(
    logits: Logits, prompt: list[int], rule: dict[str, Any], length: int, least: float, law: Law = next_token
) -> tuple[dict[Text, float], set[Text]]:
    """Probability of each bin of texts of ``length`` tokens, and the inner nodes of the tree that they are leaves of.

    A node with at least ``least`` of the mass is looked into; its rarer continuations make one bin. ``law`` gives the
    next token's probabilities as the engine at hand defines its sampling parameters.
    """
    found: dict[Text, float] = {}
    nodes: dict[Text, float] = {(): 1.0}
    inner: set[Text] = set()
    for _ in range(length):
        inner |= set(nodes)
        rows = logits([[*prompt, *text] for text in nodes]).double().tolist()
        grown: dict[Text, float] = {}
        for (text, mass), row in zip(nodes.items(), rows, strict=True):
            probs = mass * law(row, prompt, text, rule)
            found[(*text, REST)] = float(probs[probs < least].sum())
            for token in (probs >= least).nonzero().flatten().tolist():
                ended = token in rule.get("stop_token_ids", ())
                (found if ended else grown)[(*text, token)] = float(probs[token])
        nodes = grown
    return found | nodes, inner


def bin_of(text: Sequence[int], found: dict[Text, float], inner: set[Text]) -> Text:
    """The bin that holds ``text``. Raises KeyError for a text that ended where it could not."""
    for size in range(1, len(text) + 1):
        if (node := tuple(text[:size])) in found:
            return node
        if node not in inner:
            return (*node[:-1], REST)
    raise KeyError(f"{list(text)} ended early")


def pearson(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Upper tail of Pearson's statistic and its degrees of freedom; cells expected below 5 are put together.

    Whatever falls into a cell that is not expected at all has no chance: 0.0.
    """
    if bool(((expected == 0) & (counts > 0)).any()):
        return 0.0, len(counts) - 1
    small = expected < 5
    if bool(small.any()):
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2)), freedom


def fit(texts: Sequence[Sequence[int]], found: dict[Text, float], inner: set[Text]) -> tuple[float, int]:
    """``pearson`` of texts against the bins they should fall into."""
    counts = Counter(bin_of(text, found, inner) for text in texts)
    order = list(found)
    observed = torch.tensor([counts[name] for name in order], dtype=torch.float64)
    return pearson(observed, torch.tensor([found[name] for name in order], dtype=torch.float64) * len(texts))
