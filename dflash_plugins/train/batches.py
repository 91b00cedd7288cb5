"""Training batches: a few sequences with many random blocks each, and the labels of their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dflash_plugins.train.losses import IGNORED
from dflash_plugins.train.store import SequenceRef, StoreMeta


class Source(Protocol):
    """Where training has answers and features from: a ``FeatureStore``, or ``LiveFeatures`` that computes them."""

    paths: list[Path]
    meta: StoreMeta
    sequences: list[SequenceRef]

    def sources(self) -> list[str]:
        """The source name of every sequence, in the order of ``sequences``."""

    def ids(self, ref: SequenceRef) -> Tensor:
        """int32 [T], prompt and response."""

    def rows(self, ref: SequenceRef, name: str) -> Tensor:
        """Rows of ``features`` or ``final`` of one sequence, bf16 [T, width], on any device."""

    def prepare(self, refs: Sequence[SequenceRef]) -> None:
        """Told before ``rows`` of ``refs`` are asked for."""


@dataclass(frozen=True)
class Batch:
    """R sequences, C padded columns, n blocks each.

    ``features`` bf16 [R, C, taps * Ht]; ``lengths`` int64 [R]; ``anchors`` int64 [R, n] positions of the anchors;
    ``anchor_ids`` int64 [R, n]; ``labels`` int64 [R, n, K] in target ids, ``IGNORED`` beyond the sequence;
    ``final`` bf16 [R, n, K, Ht], the target's final hidden state that predicted each label.
    """

    features: Tensor
    lengths: Tensor
    anchors: Tensor
    anchor_ids: Tensor
    labels: Tensor
    final: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch there."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def random_anchors(ref: SequenceRef, count: int, generator: torch.Generator) -> Tensor:
    """``count`` positions of response tokens that have a successor, drawn uniformly; int64 [count]."""
    length = ref.stop - ref.start
    drawn = torch.rand(count, generator=generator) * (length - 1 - ref.prompt_length)
    return ref.prompt_length + drawn.long()


def every_anchor(ref: SequenceRef) -> Tensor:
    """All positions of response tokens that have a successor; int64 [n]."""
    return torch.arange(ref.prompt_length, ref.stop - ref.start - 1)


def make_batch(store: Source, refs: Sequence[SequenceRef], anchors: Sequence[Tensor], k: int) -> Batch:
    """A batch of ``refs`` with the same number of anchors in each."""
    store.prepare(refs)
    parts = [_sequence(store, ref, chosen, k) for ref, chosen in zip(refs, anchors, strict=True)]
    lengths = torch.tensor([ref.stop - ref.start for ref in refs])
    features = parts[0][0].new_zeros(len(refs), int(lengths.max()), parts[0][0].shape[-1])
    for row, (rows, *_) in enumerate(parts):
        features[row, : rows.shape[0]] = rows
    _, ids, labels, final = zip(*parts, strict=True)
    return Batch(
        features, lengths, torch.stack(list(anchors)), torch.stack(ids), torch.stack(labels), torch.stack(final)
    )


def _sequence(store: Source, ref: SequenceRef, anchors: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = store.ids(ref).long()
    slots = anchors[:, None] + torch.arange(1, k + 1)
    inside = slots < ids.shape[0]
    safe = slots.clamp_max(ids.shape[0] - 1)
    labels = torch.where(inside, ids[safe], torch.full_like(safe, IGNORED))
    return store.rows(ref, "features"), ids[anchors], labels, store.rows(ref, "final")[safe - 1]
