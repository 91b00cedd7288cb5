"""Held-out acceptance without an engine: rounds walked over answers the target gave greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_plugins.drafter import Drafter, load_drafter
from dflash_plugins.methods.base import choose_by_argmax, draft_in_passes
from dflash_plugins.pair import served_prefix_lengths
from dflash_plugins.selector import Choice
from dflash_plugins.train.batches import Batch, Source, every_anchor, make_batch
from dflash_plugins.train.blocks import BatchBackbone
from dflash_plugins.train.data import require_same_target, split
from dflash_plugins.train.initialise import TargetTensors
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.store import FeatureStore, SequenceRef

ANCHORS_AT_ONCE = 64


@dataclass(frozen=True)
class HeldOut:
    """``emitted_per_round`` over walked rounds; ``accepted_by_slot`` the share of rounds that accepted each slot.

    ``candidate_recall``: for drafters with a selector, the share of all positions at which the true token of each slot
    is among its candidates; what is not among them the selector cannot choose.
    """

    rounds: int
    emitted_per_round: float
    accepted_by_slot: tuple[float, ...]
    candidate_recall: tuple[float, ...] | None = None


def matches(drafter: Drafter, batch: Batch, k: int) -> Tensor:
    """Length of the accepted prefix of every block, drafted greedily in the passes of its method, int64 [R, n]."""
    return _drafted(drafter, batch, k)[0]


def _drafted(drafter: Drafter, batch: Batch, k: int) -> tuple[Tensor, Tensor | None]:
    """``matches``, and bool [R * n, K] whether the true token is a candidate."""
    backbone = BatchBackbone.of(drafter, batch, k)
    prefixes, _ = served_prefix_lengths(drafter.config, k)
    choose = choose_by_argmax if drafter.candidate_selector is None else _choose_and_keep
    drafted = draft_in_passes(backbone, backbone.anchors, k, choose, prefixes)
    labels = backbone.labels[:, :k]
    equal = (drafted.ids == labels) & ~drafted.dropped[:, None]
    found = None if drafted.candidates is None else (drafted.candidates == labels[..., None]).any(-1)
    return equal.long().cumprod(-1).sum(-1).view(batch.anchors.shape), found


def _choose_and_keep(scores: Tensor, _first: int) -> Choice:
    """The best, with what it was chosen from."""
    return Choice(scores.argmax(-1), scores)


@torch.no_grad()
def held_out(drafter: Drafter, store: Source, refs: Sequence[SequenceRef], k: int) -> HeldOut:
    """Walks the rounds that serving would run on the answers ``refs``: anchor, accepted prefix, correction, again."""
    found = [_at_every_position(drafter, store, ref, k) for ref in refs]
    accepted = [a for lengths, _ in found for a in _walk(lengths)]
    by_slot = tuple(sum(a >= slot for a in accepted) / len(accepted) for slot in range(1, k + 1))
    covered = [one for _, parts in found for one in parts]
    recall = tuple(torch.cat(covered).float().mean(dim=0).tolist()) if covered else None
    return HeldOut(len(accepted), 1.0 + sum(by_slot), by_slot, recall)


def _at_every_position(drafter: Drafter, store: Source, ref: SequenceRef, k: int) -> tuple[list[int], list[Tensor]]:
    """Accepted prefix of a block at every response position whose K successors are known, and what was a candidate."""
    lengths: list[int] = []
    covered: list[Tensor] = []
    for anchors in every_anchor(ref).split(ANCHORS_AT_ONCE):
        batch = make_batch(store, [ref], [anchors], k).to(drafter.fc.weight.device)
        accepted, found = _drafted(drafter, batch, k)
        lengths += accepted[0].tolist()
        covered += [] if found is None else [found.cpu()]
    whole = len(lengths) - k + 1
    return lengths[:whole], [torch.cat(covered)[:whole]] if covered else []


def _walk(lengths: Sequence[int]) -> list[int]:
    accepted, at = [], 0
    while at < len(lengths):
        accepted.append(lengths[at])
        at += lengths[at] + 1
    return accepted


def held_out_of(folder: Path, target: Path, store: Path, ks: Sequence[int]) -> dict[int, HeldOut]:
    """Of the drafter in ``folder`` for ``target``, by K: rounds over the answers of ``store`` that no run trains on."""
    drafter, tensors, features = load_drafter(folder, dtype=torch.float32), TargetTensors(target), FeatureStore(store)
    require_same_target(features, target)
    drafter.bind(tensors.embedding(), tensors.head())
    _, held = split(features, Recipe.held_out_sequences, drafter.config.block_size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return {k: held_out(drafter.eval(), features, held, k) for k in ks}
