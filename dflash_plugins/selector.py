"""The candidate selector of DFlash 2: candidates, pair scores, the walk and its realised q (methods.md section 3).

Nothing here depends on the values of the data: every shape is known before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dflash_plugins.config import SelectorConfig


class SelectorTables(Protocol):
    """The trained parts of a selector, ours or an engine's.

    Codebooks [V, rank] over target ids; ``hidden_projection`` maps [..., H] to [..., rank].
    """

    top_k: int

    @property
    def predecessor_codebook(self) -> Tensor: ...
    @property
    def successor_codebook(self) -> Tensor: ...
    @property
    def hidden_projection(self) -> Callable[[Tensor], Any]: ...


@dataclass(frozen=True)
class Choice:
    """Entries chosen from rows of scores: ``index`` int64 [R, S]; ``rows`` fp32 [R, S, C] to be kept, or None."""

    index: Tensor
    rows: Tensor | None


Choose = Callable[[Tensor, int], Choice]
"""(scores [R, S, C] of the slots first .. first + S - 1, first) -> Choice"""


@dataclass(frozen=True)
class Walk:
    """A walked block. ``ids`` int64 [R, S]; ``rows`` fp32 [R, S, C] are what the chooser keeps of each row, or None."""

    ids: Tensor
    rows: Tensor | None


class CandidateSelector(nn.Module):
    """Scores a move from token a to candidate b as U(b) + < A[a] * (W h), B[b] >.

    ``predecessor_codebook`` A and ``successor_codebook`` B are [V, rank] over target ids, ``hidden_projection`` W is
    [rank, H]. Fresh weights score every move 0 more than its own logit, and a token that is never met before another in
    training keeps doing so: its row of A stays zero.
    """

    def __init__(self, hidden_size: int, vocab_size: int, selector: SelectorConfig) -> None:
        super().__init__()
        self.top_k = selector.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, selector.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, selector.rank))
        self.hidden_projection = nn.Linear(hidden_size, selector.rank, bias=False)
        nn.init.normal_(self.successor_codebook, std=1.0)


def pair_scores(selector: SelectorTables, hidden: Tensor, previous: Tensor, candidate_ids: Tensor) -> Tensor:
    """What a move adds to the candidate's own logit: < A[previous] * (W h), B[candidate] >, [..., C].

    ``hidden`` [..., H] (final norm), ``previous`` int [...] and ``candidate_ids`` int [..., C], target ids.
    """
    turned = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden)
    added: Tensor = (selector.successor_codebook[candidate_ids] @ turned[..., None]).squeeze(-1)
    return added


def move_scores(
    selector: SelectorTables, hidden: Tensor, previous: Tensor, candidate_ids: Tensor, unary: Tensor
) -> Tensor:
    """S(previous, .) fp32 [..., C]; ``unary`` [..., C] are the candidates' logits after multiplier and softcap."""
    return unary.float() + pair_scores(selector, hidden, previous, candidate_ids).float()


def candidates(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest logits of each row [..., V] and their draft ids, best first; both [..., top_k].

    Of equal logits the lower ids win, whatever way the logits were computed or gathered.
    """
    size = logits.shape[-1]
    best = logits.topk(min(top_k, size), dim=-1)
    column = torch.arange(best.values.shape[-1], device=logits.device)
    # The last of the best may have equals that were left out: fill its places with the lowest ids among them.
    last = best.values[..., -1:]
    above = (best.values > last).sum(dim=-1, keepdim=True)
    equals_so_far = (logits == last).cumsum(dim=-1, dtype=torch.int32)
    lowest = torch.searchsorted(equals_so_far, (column - above + 1).clamp(min=1).int())
    ids = torch.where(column < above, best.indices, lowest)
    ids = ids.sort(dim=-1).values
    in_order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return in_order.values, ids.gather(-1, in_order.indices)


def choose_by_uniforms(temperature: Tensor, uniforms: Tensor) -> Choose:
    """Draws by inverting the cumulative sum; keeps the realised q of each row (one-hot for argmax rows).

    ``temperature`` fp32 [R], 0 means argmax; ``uniforms`` [R, K] in [0, 1), one per slot of the block.
    """
    sampled_row = temperature > 0
    divisor = torch.where(sampled_row, temperature, torch.ones_like(temperature))[:, None, None]

    def choose(scores: Tensor, first: int) -> Choice:
        greedy = scores.argmax(dim=-1)
        soft = torch.softmax(scores.float() / divisor, dim=-1)
        index = _invert(soft, uniforms[:, first : first + scores.shape[1]], greedy, sampled_row[:, None])
        one_hot = torch.zeros_like(soft).scatter_(-1, greedy[..., None], 1.0)
        return Choice(index, torch.where(sampled_row[:, None, None], soft, one_hot))

    return choose


def _invert(probs: Tensor, uniforms: Tensor, greedy: Tensor, sampled_row: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds the uniform; never one without mass. [..., C], [...] -> [...]"""
    cumulative = probs.double().cumsum(dim=-1)
    below = cumulative <= uniforms.double()[..., None] * cumulative[..., -1:]
    index = below.sum(dim=-1).clamp(max=probs.shape[-1] - 1)
    # A uniform at the very top may round past the last token that has mass; the best token always has some.
    has_mass = probs.gather(-1, index[..., None]).squeeze(-1) > 0
    return torch.where(sampled_row & has_mass, index, greedy)


def walk(
    selector: SelectorTables,
    hidden: Tensor,
    candidate_ids: Tensor,
    unary: Tensor,
    previous: Tensor,
    choose: Choose,
    first: int = 0,
) -> Walk:
    """Walk S slots left to right, each move scored from the token just chosen.

    ``hidden`` [R, S, H]; ``candidate_ids`` target ids [R, S, C]; ``unary`` [R, S, C]; ``previous`` int [R], the token
    before the slot ``first``, which is the first one walked. It is a walk, not the best path.
    """
    ids, rows = [], []
    for slot in range(candidate_ids.shape[1]):
        scores = move_scores(selector, hidden[:, slot], previous, candidate_ids[:, slot], unary[:, slot])
        choice = choose(scores[:, None], first + slot)
        previous = candidate_ids[:, slot].gather(-1, choice.index).squeeze(-1)
        ids.append(previous)
        rows.append(choice.rows)
    kept = [row for row in rows if row is not None]
    return Walk(torch.stack(ids, dim=1), torch.cat(kept, dim=1) if kept else None)
