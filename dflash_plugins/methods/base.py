"""What all methods share: the record, the passes of a round, and independent choice per slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.layout import block_input_ids, block_positions
from dflash_plugins.proposals import Dense, Distribution, OneHot, Proposals, Sparse, non_finite
from dflash_plugins.selector import choose


class Draft(Protocol):
    """Draft one block per row.

    ``anchors`` int [R]; ``positions`` int [R], the anchors' positions n-1; ``context`` of the same R rows; ``k`` mask
    rows, always all of them. ``temperature`` None or 0 takes an argmax everywhere (q is one-hot); a float or fp32 [R]
    samples, with 0 meaning argmax for that row. ``uniforms`` [R, k] in [0, 1) are the draws of drafting and belong to
    no other stream; without them ``generator`` (or torch's default) draws them. Rows whose logits are not finite come
    back dropped.
    """

    def __call__(
        self,
        drafter: Drafter,
        anchors: Tensor,
        positions: Tensor,
        context: ContextKV,
        k: int,
        *,
        temperature: Tensor | float | None = None,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
    ) -> Proposals: ...


@dataclass(frozen=True)
class Method:
    """One method: ``name`` in the catalogue, ``mode`` of a loop, ``architectures`` it loads, and how it drafts."""

    name: str
    summary: str
    architectures: tuple[str, ...]
    draft: Draft
    mode: str | None = None


@dataclass(frozen=True)
class Sampling:
    """``temperature`` fp32 [R]; ``uniforms`` [R, k], or None when every row takes an argmax."""

    temperature: Tensor
    uniforms: Tensor | None

    def slots(self, chosen: slice) -> Sampling:
        """The draws of some slots."""
        return Sampling(self.temperature, None if self.uniforms is None else self.uniforms[:, chosen])


@dataclass(frozen=True)
class Selected:
    """Tokens of some slots: ``ids`` int64 target ids [R, S] and ``q`` over the same slots."""

    ids: Tensor
    q: Distribution


Select = Callable[[Drafter, Tensor, Tensor, Tensor, Sampling], Selected]
"""(drafter, hidden [R, S, H], logits [R, S, V_draft], token before the first slot [R], sampling) -> Selected"""


def sampling_of(
    anchors: Tensor,
    k: int,
    temperature: Tensor | float | None,
    generator: torch.Generator | None,
    uniforms: Tensor | None,
) -> Sampling:
    """Temperatures per row and the draws they need; nothing is drawn where nothing is sampled."""
    rows, device = anchors.shape[0], anchors.device
    if temperature is None or (not isinstance(temperature, Tensor) and temperature == 0):
        return Sampling(torch.zeros(rows, device=device), None)
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(rows)
    if uniforms is None:
        uniforms = torch.rand(rows, k, generator=generator, device=device)
    return Sampling(temperatures, uniforms)


def draft_in_passes(
    drafter: Drafter,
    anchors: Tensor,
    positions: Tensor,
    context: ContextKV,
    k: int,
    sampling: Sampling,
    select: Select,
    prefix_lengths: Sequence[int] = (),
) -> Proposals:
    """Run the drafter once per prefix and once more; every pass selects its own slots and keeps what is selected.

    ``prefix_lengths`` rise strictly and lie strictly between 0 and k. With none this is a single pass over all slots.
    """
    bounds = [0, *prefix_lengths, k]
    ids = anchors.new_empty(anchors.shape[0], 0, dtype=torch.int64)
    dropped = torch.zeros(anchors.shape[0], dtype=torch.bool, device=anchors.device)
    parts: list[Selected] = []
    for first, last in pairwise(bounds):
        inputs = block_input_ids(anchors, drafter.config.mask_token_id, k, ids)
        # Row 0 is the anchor, so slot s of the proposals is row s + 1.
        hidden = drafter.hidden(inputs, block_positions(positions, k), context)[:, first + 1 : last + 1]
        logits = drafter.logits(hidden)
        dropped = dropped | non_finite(logits)
        logits = logits.masked_fill(dropped[:, None, None], 0.0)
        hidden = hidden.masked_fill(dropped[:, None, None], 0.0)
        previous = ids[:, -1] if parts else anchors
        parts.append(select(drafter, hidden, logits, previous.long(), sampling.slots(slice(first, last))))
        ids = torch.cat([ids, parts[-1].ids], dim=1)
    return Proposals.of(ids, _joined([part.q for part in parts]), dropped=dropped)


def _joined(parts: list[Distribution]) -> Distribution:
    """q of consecutive slots as one; passes of one round all use the same kind."""
    dense = [part for part in parts if isinstance(part, Dense)]
    sparse = [part for part in parts if isinstance(part, Sparse)]
    if len(dense) == len(parts):
        return Dense(torch.cat([part.probs for part in dense], dim=1))
    if len(sparse) == len(parts):
        return Sparse(torch.cat([p.ids for p in sparse], dim=1), torch.cat([p.probs for p in sparse], dim=1))
    return OneHot()


def select_independently(
    drafter: Drafter, _hidden: Tensor, logits: Tensor, _previous: Tensor, sampling: Sampling
) -> Selected:
    """Each slot for itself: argmax, or a draw from softmax(logits / T). A reduced head gives a sparse q."""
    rows, slots, vocab = logits.shape
    temperature = sampling.temperature[:, None].expand(rows, slots).reshape(-1)
    uniforms = None if sampling.uniforms is None else sampling.uniforms.reshape(-1)
    if uniforms is None:
        return Selected(drafter.target_ids(logits.argmax(dim=-1)), OneHot())
    index, probs = choose(logits.reshape(-1, vocab), temperature, uniforms)
    ids, probs = drafter.target_ids(index).view(rows, slots), probs.view(rows, slots, vocab)
    if drafter.d2t is None:
        return Selected(ids, Dense(probs))
    whole = drafter.target_ids(torch.arange(vocab, device=logits.device))
    return Selected(ids, Sparse(whole.expand(rows, slots, vocab), probs))
