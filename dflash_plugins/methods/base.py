"""What all methods share: the passes of a round over whoever runs the drafter, and how slots are chosen.

The loop schedule, the walk and the realised q are written here and in ``selector`` once. The reference drafter, a
training batch and each engine's buffers appear as a ``Backbone``. Nothing here depends on values of the data, so a
round may be captured whole in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.layout import block_input_ids, block_positions
from dflash_plugins.proposals import Dense, Distribution, OneHot, Proposals, Sparse, non_finite
from dflash_plugins.selector import Choice, Choose, SelectorTables, candidates, choose_by_uniforms, walk


class Backbone(Protocol):
    """Whoever runs the drafter on R blocks of K mask rows, with context and positions of its own."""

    @property
    def selector(self) -> SelectorTables | None:
        """Tables of the selector, or None where slots are chosen by themselves."""

    def hidden(self, known: Tensor, slots: slice) -> Tensor:
        """Run a pass: block ids ``[anchor, known, MASK ...]``, ``known`` int64 target ids [R, m], m = slots.start.

        Returns final-norm hidden states [R, S, H] of the proposals ``slots`` (slot 0 is the first after the anchor).
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, S, V_draft] after multiplier and softcap."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for ids of the head's rows, same shape."""


@dataclass(frozen=True)
class Drafted:
    """A drafted block: ``ids`` int64 target ids [R, K].

    ``rows`` [R, K, C] is what the chooser keeps of each slot (its realised q, or scores), None where it keeps nothing;
    ``candidates`` int64 target ids [R, K, C] of those columns, None where they are the head's rows in order.
    ``dropped`` bool [R]: some logit was not finite.
    """

    ids: Tensor
    rows: Tensor | None
    candidates: Tensor | None
    dropped: Tensor


def draft_in_passes(
    backbone: Backbone, anchors: Tensor, k: int, choose: Choose, prefix_lengths: Sequence[int] = ()
) -> Drafted:
    """Run the drafter once per prefix and once more; every pass selects its own slots and keeps what is selected.

    ``anchors`` int [R]. ``prefix_lengths`` rise strictly and lie strictly between 0 and k; with none this is a single
    pass over all slots. ``choose`` draws the slots' tokens (``selector.Choose``).
    """
    ids = anchors.new_empty(anchors.shape[0], 0, dtype=torch.int64)
    dropped = torch.zeros(anchors.shape[0], dtype=torch.bool, device=anchors.device)
    parts: list[Drafted] = []
    for first, last in pairwise([0, *prefix_lengths, k]):
        hidden = backbone.hidden(ids, slice(first, last))
        logits = backbone.logits(hidden)
        dropped = dropped | non_finite(logits)
        logits = logits.masked_fill(dropped[:, None, None], 0.0)
        hidden = hidden.masked_fill(dropped[:, None, None], 0.0)
        previous = ids[:, -1] if parts else anchors.long()
        parts.append(_select(backbone, hidden, logits, previous, choose, first, dropped))
        ids = torch.cat([ids, parts[-1].ids], dim=1)
    rows, names = [part.rows for part in parts], [part.candidates for part in parts]
    return Drafted(ids, _joined(rows), _joined(names), dropped)


def _select(
    backbone: Backbone, hidden: Tensor, logits: Tensor, previous: Tensor, choose: Choose, first: int, dropped: Tensor
) -> Drafted:
    selector = backbone.selector
    if selector is None:
        choice = choose(logits, first)
        return Drafted(backbone.target_ids(choice.index), choice.rows, None, dropped)
    unary, draft_ids = candidates(logits, selector.top_k)
    names = backbone.target_ids(draft_ids)
    walked = walk(selector, hidden, names, unary, previous, choose, first)
    return Drafted(walked.ids, walked.rows, None if walked.rows is None else names, dropped)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Consecutive slots as one; passes of one round all keep the same kind of thing."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors, dim=1) if tensors else None


def realised_q(backbone: Backbone, drafted: Drafted) -> Distribution:
    """q of a block whose ``rows`` are the distributions its tokens were drawn from; one-hot where nothing was kept."""
    if drafted.rows is None:
        return OneHot()
    if drafted.candidates is not None:
        return Sparse(drafted.candidates, drafted.rows)
    whole = torch.arange(drafted.rows.shape[-1], device=drafted.rows.device)
    names = backbone.target_ids(whole)
    # The same tensor comes back where head rows and target ids are the same thing.
    return Dense(drafted.rows) if names is whole else Sparse(names.expand(drafted.rows.shape), drafted.rows)


class DrafterParts(Protocol):
    """What a block needs of a drafter besides its passes: our own ``Drafter`` or the class that an engine serves."""

    @property
    def candidate_selector(self) -> Any:
        """``SelectorTables``, or None where slots are chosen by themselves."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V_draft] of final-norm ``hidden`` [..., H], after multiplier and softcap."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for rows of the head, any shape."""


class OnDrafter:
    """What a ``Backbone`` has of its ``drafter``, whatever its blocks and context are."""

    drafter: DrafterParts

    @property
    def selector(self) -> SelectorTables | None:
        """See ``Backbone``."""
        return cast(SelectorTables | None, self.drafter.candidate_selector)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Backbone``."""
        return self.drafter.logits(hidden)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """See ``Backbone``."""
        return self.drafter.target_ids(draft_ids)


@dataclass(frozen=True)
class ReferenceBackbone(OnDrafter):
    """The reference ``drafter`` on ``context`` of R rows, anchors [R] at ``positions`` [R], ``k`` mask rows."""

    drafter: Drafter
    anchors: Tensor
    positions: Tensor
    context: ContextKV
    k: int

    def hidden(self, known: Tensor, slots: slice) -> Tensor:
        """See ``Backbone``."""
        inputs = block_input_ids(self.anchors, self.drafter.config.mask_token_id, self.k, known)
        rows = self.drafter.hidden(inputs, block_positions(self.positions, self.k), self.context)
        # Row 0 is the anchor, so slot s of the proposals is row s + 1.
        return rows[:, slots.start + 1 : slots.stop + 1]


def chooser(
    anchors: Tensor,
    k: int,
    temperature: Tensor | float | None,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
) -> Choose:
    """How the slots of a block are drawn; nothing is drawn where nothing is sampled. Arguments as in ``Method``."""
    if temperature is None or (not isinstance(temperature, Tensor) and temperature == 0):
        return choose_by_argmax
    rows, device = anchors.shape[0], anchors.device
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(rows)
    if uniforms is None:
        uniforms = torch.rand(rows, k, generator=generator, device=device)
    return choose_by_uniforms(temperatures, uniforms)


def choose_by_argmax(scores: Tensor, _first: int) -> Choice:
    """The best of each row, of equals the first; q is one-hot, so nothing is kept."""
    return Choice(scores.argmax(dim=-1), None)


def one_pass(_drafter: Drafter, _k: int) -> tuple[int, ...]:
    """The schedule of a method that does not loop."""
    return ()


@dataclass(frozen=True)
class Method:
    """One method: ``name`` in the catalogue, ``mode`` of a loop, ``architectures`` it loads, and how it drafts.

    ``prefix_lengths(drafter, k)`` is its schedule of passes (``draft_in_passes``); it raises for a drafter that the
    method cannot draft with.
    """

    name: str
    summary: str
    architectures: tuple[str, ...]
    prefix_lengths: Callable[[Drafter, int], Sequence[int]] = one_pass
    mode: str | None = None

    def draft(
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
    ) -> Proposals:
        """Draft one block per row with the reference drafter.

        ``anchors`` int [R]; ``positions`` int [R], the anchors' positions n-1; ``context`` of the same R rows; ``k``
        mask rows, always all of them. ``temperature`` None or 0 takes an argmax everywhere (q is one-hot); a float or
        fp32 [R] samples, with 0 meaning argmax for that row. ``uniforms`` [R, k] in [0, 1) are the draws of drafting
        and belong to no other stream; without them ``generator`` (or torch's default) draws them. Rows whose logits are
        not finite come back dropped.
        """
        lengths = self.prefix_lengths(drafter, k)
        backbone = ReferenceBackbone(drafter, anchors, positions, context, k)
        choose = chooser(anchors, k, temperature, generator, uniforms)
        drafted = draft_in_passes(backbone, anchors, k, choose, lengths)
        return Proposals.of(drafted.ids, realised_q(backbone, drafted), dropped=drafted.dropped)
