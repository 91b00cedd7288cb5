"""The candidate selector of DFlash 2: candidates, pair scores, the walk and its realised q (methods.md section 3).

Nothing here depends on the values of the data: every shape is known before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_plugins.config import SelectorConfig


@dataclass(frozen=True)
class Walk:
    """A walked block. ``ids`` int64 [R, K]; ``probs`` fp32 [R, K, C]: the row each token was really drawn from.

    ``probs`` is one-hot where the token was an argmax.
    """

    ids: Tensor
    probs: Tensor


class CandidateSelector(nn.Module):
    """Scores a move from token a to candidate b as U(b) + < A[a] * (W h), B[b] >.

    ``predecessor_codebook`` A and ``successor_codebook`` B are [V, rank] over target ids, ``hidden_projection`` W is
    [rank, H]. Fresh weights score every move 0 more than its own logit.
    """

    def __init__(self, hidden_size: int, vocab_size: int, selector: SelectorConfig) -> None:
        super().__init__()
        self.top_k = selector.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, selector.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, selector.rank))
        self.hidden_projection = nn.Linear(hidden_size, selector.rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=1.0)

    def pair_scores(self, hidden: Tensor, previous: Tensor, candidate_ids: Tensor) -> Tensor:
        """What a move adds to the candidate's own logit.

        ``hidden`` [..., H] (final norm), ``previous`` int [...] and ``candidate_ids`` int [..., C], target ids.
        Returns [..., C].
        """
        turned = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        added: Tensor = (self.successor_codebook[candidate_ids] @ turned[..., None]).squeeze(-1)
        return added

    def scores(self, hidden: Tensor, previous: Tensor, candidate_ids: Tensor, unary: Tensor) -> Tensor:
        """S(previous, .) fp32 [..., C]; ``unary`` [..., C] are the candidates' logits after multiplier and softcap."""
        return unary.float() + self.pair_scores(hidden, previous, candidate_ids).float()


def candidates(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest logits of each row [..., V] and their draft ids, best first; both [..., top_k]."""
    best = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return best.values, best.indices


def choose(scores: Tensor, temperature: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose one entry of each row and say with which distribution.

    ``scores`` [R, C]; ``temperature`` fp32 [R], 0 means argmax; ``uniforms`` [R] in [0, 1), None when no row samples.
    Returns indices int64 [R] and probs fp32 [R, C] (one-hot for argmax rows). Sampling inverts the cumulative sum.
    """
    greedy = scores.argmax(dim=-1)
    one_hot = nn.functional.one_hot(greedy, scores.shape[-1]).float()
    if uniforms is None:
        return greedy, one_hot
    sampled_row = temperature > 0
    divisor = torch.where(sampled_row, temperature, torch.ones_like(temperature))
    soft = torch.softmax(scores.float() / divisor[:, None], dim=-1)
    return _invert(soft, uniforms, greedy, sampled_row), torch.where(sampled_row[:, None], soft, one_hot)


def _invert(probs: Tensor, uniforms: Tensor, greedy: Tensor, sampled_row: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds the uniform; never one without mass."""
    cumulative = probs.double().cumsum(dim=-1)
    below = cumulative <= uniforms.double()[:, None] * cumulative[:, -1:]
    index = below.sum(dim=-1).clamp(max=probs.shape[-1] - 1)
    # A uniform at the very top may round past the last token that has mass; the best token always has some.
    has_mass = probs.gather(-1, index[:, None]).squeeze(-1) > 0
    return torch.where(sampled_row & has_mass, index, greedy)


def walk(
    selector: CandidateSelector,
    hidden: Tensor,
    candidate_ids: Tensor,
    unary: Tensor,
    previous: Tensor,
    temperature: Tensor,
    uniforms: Tensor | None,
) -> Walk:
    """Walk K slots left to right, each move scored from the token just chosen.

    ``hidden`` [R, K, H]; ``candidate_ids`` target ids [R, K, C]; ``unary`` [R, K, C]; ``previous`` int [R], the token
    before the first slot; ``temperature`` [R]; ``uniforms`` [R, K] or None. It is a walk, not the best path.
    """
    ids, probs = [], []
    for slot in range(candidate_ids.shape[1]):
        scores = selector.scores(hidden[:, slot], previous, candidate_ids[:, slot], unary[:, slot])
        index, row = choose(scores, temperature, None if uniforms is None else uniforms[:, slot])
        previous = candidate_ids[:, slot].gather(-1, index[:, None]).squeeze(-1)
        ids.append(previous)
        probs.append(row)
    return Walk(torch.stack(ids, dim=1), torch.stack(probs, dim=1))
