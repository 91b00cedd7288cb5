"""Held-out acceptance without an engine: rounds walked over answers the target gave greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_plugins.drafter import Drafter
from dflash_plugins.methods.base import choose_by_argmax, draft_in_passes
from dflash_plugins.pair import served_prefix_lengths
from dflash_plugins.train.batches import Batch, every_anchor, make_batch
from dflash_plugins.train.blocks import BatchBackbone
from dflash_plugins.train.store import FeatureStore, SequenceRef

ANCHORS_AT_ONCE = 64


@dataclass(frozen=True)
class HeldOut:
    """``emitted_per_round`` over walked rounds; ``accepted_by_slot`` the share of rounds that accepted each slot."""

    rounds: int
    emitted_per_round: float
    accepted_by_slot: tuple[float, ...]


def matches(drafter: Drafter, batch: Batch, k: int) -> Tensor:
    """Length of the accepted prefix of every block, drafted greedily in the passes of its method, int64 [R, n]."""
    backbone = BatchBackbone.of(drafter, batch, k)
    prefixes, _ = served_prefix_lengths(drafter.config, k)
    drafted = draft_in_passes(backbone, backbone.anchors, k, choose_by_argmax, prefixes)
    equal = (drafted.ids == backbone.labels[:, :k]) & ~drafted.dropped[:, None]
    return equal.long().cumprod(-1).sum(-1).view(batch.anchors.shape)


@torch.no_grad()
def held_out(drafter: Drafter, store: FeatureStore, refs: Sequence[SequenceRef], k: int) -> HeldOut:
    """Walks the rounds that serving would run on the answers ``refs``: anchor, accepted prefix, correction, again."""
    accepted = [a for ref in refs for a in _walk(_prefix_lengths(drafter, store, ref, k))]
    by_slot = tuple(sum(a >= slot for a in accepted) / len(accepted) for slot in range(1, k + 1))
    return HeldOut(len(accepted), 1.0 + sum(by_slot), by_slot)


def _prefix_lengths(drafter: Drafter, store: FeatureStore, ref: SequenceRef, k: int) -> list[int]:
    """Accepted prefix of a block at every response position whose K successors are known."""
    lengths: list[int] = []
    for anchors in every_anchor(ref).split(ANCHORS_AT_ONCE):
        batch = make_batch(store, [ref], [anchors], k).to(drafter.fc.weight.device)
        lengths += matches(drafter, batch, k)[0].tolist()
    return lengths[: len(lengths) - k + 1]


def _walk(lengths: Sequence[int]) -> list[int]:
    accepted, at = [], 0
    while at < len(lengths):
        accepted.append(lengths[at])
        at += lengths[at] + 1
    return accepted
