"""Rules of a request that count its output, for every row of a block: penalties and ``min_new_tokens``.

SGLang (0.5.21) applies them once to a whole block, or, where it prepares the next batch while one runs, not at all. Its
host does not know the newest tokens then, so the worker keeps the counts itself, on the device. As in the engine's own
sampler the prompt counts for nothing, and additive penalties come before the repetition penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dflash_plugins.proposals import OneHot, Proposals
from dflash_plugins.sampling import Penalties, SamplingRule, processed_logits

# Sampling parameters that count tokens, and where they change nothing.
COUNTING = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}


@dataclass(frozen=True)
class EnginePenalties(Penalties):
    """Penalties as SGLang's sampler computes them."""

    def on(self, logits: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        """See ``Penalties``; ``seen`` is not looked at."""
        repetition, presence, frequency = (
            column.view(-1, *[1] * (logits.dim() - 1)) for column in (self.repetition, self.presence, self.frequency)
        )
        there = counts > 0
        logits = logits - frequency * counts - presence * there
        return torch.where(there, torch.where(logits < 0, logits * repetition, logits / repetition), logits)


class Outputs:
    """How often each request has put out each token. A request's counts go with the engine's record of it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()

    def at_prefill(self, requests: Sequence[Any], sampling: Any) -> Any:
        """Count what each request has put out before this prefill: something only if it was put back.

        Returns ``sampling`` as the engine has to be given it, with the penalties of these counts.
        """
        device = sampling.temperatures.device
        for _, request in _counting(requests):
            tokens = torch.tensor(list(request.output_ids), dtype=torch.int64)
            self._counts[request] = torch.bincount(tokens, minlength=self._vocab_size).to(torch.int32).to(device)
        rows, counting, counts = self._chosen(requests, device)
        additive = torch.zeros(len(requests), self._vocab_size, device=device)
        scaling = torch.ones_like(additive)
        penalties, allowed = _penalties(counting, counts), _allowed(counting, counts, 1, self._vocab_size)
        additive[rows] = -penalties.frequency[:, None] * counts - penalties.presence[:, None] * (counts > 0)
        scaling[rows] = torch.where(counts > 0, penalties.repetition[:, None], 1.0)
        if allowed is not None:
            additive[rows] = additive[rows].masked_fill(~allowed[:, 0], float("-inf"))
        return replace(
            sampling, penalizer_orchestrator=None, acc_additive_penalties=additive, acc_scaling_penalties=scaling
        )

    def begin(self, requests: Sequence[Any], first_tokens: Tensor) -> None:
        """After a prefill that gave ``first_tokens`` [R]."""
        self.add(requests, first_tokens[:, None], torch.ones_like(first_tokens))

    def add(self, requests: Sequence[Any], tokens: Tensor, emitted: Tensor) -> None:
        """After a round: the first ``emitted`` [R] of ``tokens`` [R, B] of each request."""
        kept = (torch.arange(tokens.shape[1], device=tokens.device) < emitted[:, None]).to(torch.int32)
        for row, request in _counting(requests):
            self._counts[request].scatter_add_(0, tokens[row].long(), kept[row])

    def penalise(self, requests: Sequence[Any], block_ids: Tensor, logits: Tensor) -> None:
        """Apply the rules to ``logits`` [R * B, V], in place. ``block_ids`` [R, B] are the anchors and proposals.

        Row i counts what was put out before the block, and the proposals of slots 1..i as if they were.
        """
        rows, counting, counts = self._chosen(requests, logits.device)
        width = block_ids.shape[1]
        allowed = _allowed(counting, counts, width, self._vocab_size)
        rule = SamplingRule(None, False, True, penalties=_penalties(counting, counts), allowed=allowed)
        proposals = Proposals.of(block_ids[rows, 1:].long(), OneHot())
        by_request = logits.view(len(requests), width, -1)
        by_request[rows] = processed_logits(by_request[rows], rule, proposals).to(logits.dtype)

    def _chosen(self, requests: Sequence[Any], device: Any) -> tuple[Tensor, list[Any], Tensor]:
        """Rows [P], requests and counts [P, V] of those that count tokens."""
        chosen = _counting(requests)
        rows, counting = [row for row, _ in chosen], [request for _, request in chosen]
        return torch.tensor(rows, device=device), counting, torch.stack([self._counts[one] for one in counting])


def counts_tokens(request: Any) -> bool:
    """Whether a rule of the request counts its output."""
    params = request.sampling_params
    return any(getattr(params, name) not in (off, None) for name, off in COUNTING.items())


def _counting(requests: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(row, request) for row, request in enumerate(requests) if counts_tokens(request)]


def _penalties(requests: Sequence[Any], counts: Tensor) -> EnginePenalties:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    repetition, presence, frequency = (
        torch.tensor([float(getattr(one.sampling_params, name)) for one in requests], device=counts.device)
        for name in names
    )
    return EnginePenalties(repetition, presence, frequency, prompt_seen=counts > 0, output_counts=counts)


def _allowed(requests: Sequence[Any], counts: Tensor, width: int, vocab_size: int) -> Tensor | None:
    """bool [P, B, V]: False for what ends a text in rows that come before ``min_new_tokens``; None without any."""
    least = [int(one.sampling_params.min_new_tokens) for one in requests]
    if not any(least):
        return None
    ends = torch.zeros(len(requests), vocab_size, dtype=torch.bool)
    for row, request in enumerate(requests):
        ends[row, sorted(_ends(request))] = True
    there = counts.sum(dim=1)[:, None] + torch.arange(width, device=counts.device)
    early = there < torch.tensor(least, device=counts.device)[:, None]
    return ~(early[..., None] & ends.to(counts.device)[:, None])


def _ends(request: Any) -> set[int]:
    """As the engine collects them."""
    tokenizer = request.tokenizer
    found = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    found |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    return {int(token) for token in (*found, getattr(tokenizer, "eos_token_id", None)) if token is not None}
