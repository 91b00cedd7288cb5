"""Held-out acceptance without an engine: rounds walked over answers the target gave greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_plugins.drafter import Drafter
from dflash_plugins.layout import block_input_ids, training_mask, training_positions
from dflash_plugins.train.batches import Batch, every_anchor, make_batch
from dflash_plugins.train.store import FeatureStore, SequenceRef

ANCHORS_AT_ONCE = 64


@dataclass(frozen=True)
class HeldOut:
    """``emitted_per_round`` over walked rounds; ``accepted_by_slot`` the share of rounds that accepted each slot."""

    rounds: int
    emitted_per_round: float
    accepted_by_slot: tuple[float, ...]


def block_hidden(drafter: Drafter, batch: Batch, k: int) -> Tensor:
    """Final-norm hidden states of all blocks of a batch, [R, n, k + 1, H]."""
    rows, blocks = batch.anchors.shape
    block = k + 1
    columns = batch.features.shape[1]
    positions = torch.arange(columns).expand(rows, -1)
    context = drafter.context_kv(batch.features, positions, batch.lengths)
    ids = block_input_ids(batch.anchor_ids.flatten(), drafter.config.mask_token_id, k).view(rows, blocks * block)
    mask = training_mask(batch.anchors, columns, block)
    hidden = drafter.hidden(ids, training_positions(batch.anchors, block), context, mask=mask, block=block)
    return hidden.view(rows, blocks, block, -1)


def matches(drafter: Drafter, batch: Batch, k: int) -> Tensor:
    """Length of the accepted prefix of every block under greedy drafting, int64 [R, n]."""
    hidden = block_hidden(drafter, batch, k)[:, :, 1:]
    drafted = drafter.target_ids(drafter.logits(hidden).argmax(-1))
    return (drafted == batch.labels[..., :k]).long().cumprod(-1).sum(-1)


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
        batch = make_batch(store, [ref], [anchors], k)
        lengths += matches(drafter, batch, k)[0].tolist()
    return lengths[: len(lengths) - k + 1]


def _walk(lengths: Sequence[int]) -> list[int]:
    accepted, at = [], 0
    while at < len(lengths):
        accepted.append(lengths[at])
        at += lengths[at] + 1
    return accepted
