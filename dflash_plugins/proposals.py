"""Proposals of one round: drafted tokens together with the distribution q each was drawn from.

Shapes: R requests, K slots, V target vocabulary, C candidates per slot. Ids are always ids of the TARGET vocabulary,
also when the drafter has a reduced one. Nothing here synchronises with the device or depends on tensor values, so a
round can be captured in a CUDA graph; `lists` is the one exception and says so. (methods.md section 6)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PADDING = -1
"""Stands in every id tensor where there is no token."""


@dataclass(frozen=True)
class OneHot:
    """q puts everything on the proposal itself: the drafter took an argmax, whatever softmax it had."""

    def of_proposals(self, ids: Tensor) -> Tensor:
        """q(y) of each proposal y: [R, K] fp32, all ones."""
        return torch.ones(ids.shape, dtype=torch.float32, device=ids.device)

    def row(self, ids: Tensor, slots: Tensor, vocab_size: int) -> Tensor:
        """The whole q of one slot per request, `slots` [R]: [R, V] fp32."""
        token = ids.gather(1, slots[:, None]).clamp(min=0)
        return torch.zeros(len(slots), vocab_size, device=ids.device).scatter_(1, token, 1.0)

    def residual(self, p: Tensor, ids: Tensor, slots: Tensor, rejected: Tensor) -> Tensor:
        """Weights of the correction or bonus from `p` [R, V] fp32, which is overwritten; see `Proposals.residual`."""
        token = ids.gather(1, slots[:, None]).clamp(min=0)
        return _reduced(p, token, rejected[:, None].float())


@dataclass(frozen=True)
class Dense:
    """q over the whole target vocabulary. `probs` [R, K, V] fp32, each row summing to 1."""

    probs: Tensor

    def of_proposals(self, ids: Tensor) -> Tensor:
        """q(y) of each proposal y: [R, K] fp32."""
        return self.probs.gather(2, ids.clamp(min=0)[..., None])[..., 0]

    def row(self, ids: Tensor, slots: Tensor, vocab_size: int) -> Tensor:
        """The whole q of one slot per request, `slots` [R]: [R, V] fp32."""
        return self.probs[torch.arange(len(slots), device=slots.device), slots]

    def residual(self, p: Tensor, ids: Tensor, slots: Tensor, rejected: Tensor) -> Tensor:
        """Weights of the correction or bonus from `p` [R, V] fp32, which is overwritten; see `Proposals.residual`."""
        q = self.row(ids, slots, p.shape[1]).masked_fill_(~rejected[:, None], 0.0)
        left = q.neg_().add_(p).clamp_(min=0)
        return torch.where(left.sum(dim=1, keepdim=True) > 0, left, p)


@dataclass(frozen=True)
class Sparse:
    """q over C candidates per slot, zero elsewhere; never expanded to [R, K, V].

    `ids` [R, K, C] int64 target ids, PADDING where a slot has fewer candidates; `probs` [R, K, C] fp32. An id named
    twice in a slot has the sum of both probabilities.
    """

    ids: Tensor
    probs: Tensor

    def of_proposals(self, ids: Tensor) -> Tensor:
        """q(y) of each proposal y: [R, K] fp32."""
        return torch.where(self.ids == ids[..., None], self.probs, 0.0).sum(-1)

    def row(self, ids: Tensor, slots: Tensor, vocab_size: int) -> Tensor:
        """The whole q of one slot per request, `slots` [R]: [R, V] fp32."""
        candidates, probs = self._at(slots)
        return torch.zeros(len(slots), vocab_size, device=ids.device).scatter_add_(1, candidates, probs)

    def residual(self, p: Tensor, ids: Tensor, slots: Tensor, rejected: Tensor) -> Tensor:
        """Weights of the correction or bonus from `p` [R, V] fp32, which is overwritten; see `Proposals.residual`."""
        candidates, probs = self._at(slots)
        # An id named twice is written twice, both times with its whole probability, so the order does not matter.
        same = candidates[:, :, None] == candidates[:, None]
        q = torch.where(same & rejected[:, None, None], probs[:, None], 0.0).sum(-1)
        return _reduced(p, candidates, q)

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates and probabilities [R, C] of one slot per request; padding becomes token 0 with probability 0."""
        requests = torch.arange(len(slots), device=slots.device)
        candidates, probs = self.ids[requests, slots], self.probs[requests, slots]
        return candidates.clamp(min=0), torch.where(candidates >= 0, probs, 0.0).float()


def _reduced(p: Tensor, ids: Tensor, q: Tensor) -> Tensor:
    """`p` [R, V] less `q` [R, C] at `ids`, in place, but as it was where nothing would be left."""
    before = p.gather(1, ids)
    after = (before - q).clamp(min=0)
    nothing = p.scatter_(1, ids, after).sum(dim=1, keepdim=True) <= 0
    return p.scatter_(1, ids, torch.where(nothing, before, after))


Distribution = OneHot | Dense | Sparse


@dataclass(frozen=True)
class Proposals:
    """What the drafter hands to verification.

    ids      [R, K] int64 target ids, PADDING from `lengths` on
    lengths  [R] int64, proposals per request, 0..K
    q        the distribution the tokens were REALLY drawn from: after temperature, top-k, selector or loop
    dropped  [R] bool: the draft had non-finite logits; nothing of it may be accepted, and it is counted

    Build with `Proposals.of`, which fills what is left out and pads. Raises ValueError for shapes that do not fit.
    """

    ids: Tensor
    lengths: Tensor
    q: Distribution
    dropped: Tensor

    def __post_init__(self) -> None:
        rows, slots = self.ids.shape
        wrong = [f"ids must be int64, not {self.ids.dtype}"] if self.ids.dtype != torch.int64 else []
        for name in ("lengths", "dropped"):
            shape = tuple(getattr(self, name).shape)
            wrong += [f"{name} must be [{rows}], not {list(shape)}"] if shape != (rows,) else []
        if isinstance(self.q, Dense | Sparse) and self.q.probs.shape[:2] != (rows, slots):
            wrong.append(f"q must begin with [{rows}, {slots}], not {list(self.q.probs.shape[:2])}")
        if isinstance(self.q, Sparse) and self.q.ids.shape != self.q.probs.shape:
            wrong.append(f"candidate ids {list(self.q.ids.shape)} and probabilities {list(self.q.probs.shape)} differ")
        if wrong:
            raise ValueError("; ".join(wrong))

    @classmethod
    def of(
        cls,
        ids: Tensor,
        q: Distribution | None = None,
        *,
        lengths: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> Proposals:
        """Proposals with the usual defaults: one-hot q, all K slots, nothing dropped; pads and empties dropped rows."""
        rows, slots = ids.shape
        full = torch.full((rows,), slots, dtype=torch.int64, device=ids.device)
        dropped = torch.zeros_like(full, dtype=torch.bool) if dropped is None else dropped
        whole = cls(ids.long(), full, OneHot() if q is None else q, dropped)
        return whole.cut(full if lengths is None else lengths)

    @property
    def num_slots(self) -> int:
        """K, the width of the padded ids."""
        return self.ids.shape[1]

    def cut(self, lengths: Tensor) -> Proposals:
        """At most `lengths` [R] proposals per request; the block was still drafted with all its masks.

        Lossless as long as `lengths` does not depend on the cut tokens themselves: a budget, a dynamic K.
        """
        kept = torch.minimum(self.lengths, lengths.to(self.lengths)).clamp(min=0).masked_fill(self.dropped, 0)
        beyond = torch.arange(self.num_slots, device=self.ids.device) >= kept[:, None]
        return replace(self, ids=self.ids.masked_fill(beyond, PADDING), lengths=kept)

    def residual(self, p: Tensor, accepted: Tensor, lengths: Tensor) -> Tensor:
        """What the correction or bonus is drawn from, [R, V] fp32, not normalised.

        `p` [R, V] fp32 is the target's row `accepted` and is overwritten. [p-q]+ after a rejection, p after a whole
        block (`accepted` == `lengths`, both [R]). Only the row of the rejection is read of q, and candidate-sparse q is
        not expanded. No mass is left only where p and q differ by rounding; there p itself is the limit.
        """
        if self.num_slots == 0:
            return p
        return self.q.residual(p, self.ids, accepted.clamp(max=self.num_slots - 1), accepted < lengths)

    def still_masked(self, mask_token_id: int) -> Tensor:
        """[R] bool: some proposal still is the mask id, which after drafting is a fault of the drafter."""
        return (self.ids == mask_token_id).any(dim=1)

    def lists(self) -> list[list[int]]:
        """Token lists for a scheduler, without padding: empty for a dropped or skipped request. Synchronises."""
        pairs = zip(self.ids.tolist(), self.lengths.tolist(), strict=True)
        return [ids[:length] for ids, length in pairs]


class NonFinite:
    """Counts drafts that are not finite; warns of the first where that needs no wait."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        """``what`` says of their number, %d, what they are and what becomes of them."""
        self.count = 0
        self._logger = logger
        question = "was the drafter trained in another dtype than it is served in?"
        self._message = f"dflash-plugins: {what} (reported once); {question}"

    def add(self, bad: Tensor) -> None:
        """Count ``bad``, bool of any shape."""
        if bad.is_cuda:
            return  # reading it would make the host wait; verification is as safe without the message
        found = int(bad.sum())
        if found and not self.count:
            self._logger.warning(self._message, found)
        self.count += found


def non_finite(logits: Tensor) -> Tensor:
    """Which requests have a non-finite raw draft logit: [R, K, V] -> [R] bool. Ask before masking anything to -inf."""
    low, high = torch.aminmax(logits, dim=-1)  # both are NaN if one logit is
    return ~(low.isfinite() & high.isfinite()).all(dim=-1)
