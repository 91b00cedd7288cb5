"""The drafter on a training batch: many blocks of a few sequences in one forward, for the losses and for drafting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.layout import block_input_ids, training_mask, training_positions
from dflash_plugins.methods.base import OnDrafter
from dflash_plugins.train.batches import Batch

if TYPE_CHECKING:
    from dflash_plugins.train.flex import FlexMasks


@dataclass(frozen=True)
class BatchBackbone(OnDrafter):
    """``methods.base.Backbone`` over all blocks of ``batch``: row r * n + i is block i of sequence r.

    ``context`` holds the sequences' context K/V once (``of`` computes it); every block sees it up to its own anchor.
    ``flex``: by flex attention or by a dense mask; None: the former on a GPU.
    """

    drafter: Drafter
    batch: Batch
    k: int
    context: ContextKV
    flex: bool | None = None

    @classmethod
    def of(cls, drafter: Drafter, batch: Batch, k: int) -> BatchBackbone:
        """With the context computed from the batch's features."""
        rows, columns = batch.features.shape[:2]
        positions = torch.arange(columns, device=batch.features.device).expand(rows, -1)
        return cls(drafter, batch, k, drafter.context_kv(batch.features, positions, batch.lengths))

    @property
    def anchors(self) -> Tensor:
        """Anchor ids of all blocks, int64 [R * n]."""
        return self.batch.anchor_ids.flatten()

    @property
    def labels(self) -> Tensor:
        """True tokens of all blocks, int64 [R * n, K] in target ids."""
        return self.batch.labels.flatten(0, 1)

    def rows(self, known: Tensor) -> Tensor:
        """One pass: final-norm hidden states [R * n, k + 1, H] with ``known`` int64 [R * n, m] after the anchors."""
        batch, block = self.batch, self.k + 1
        ids = block_input_ids(self.anchors, self.drafter.config.mask_token_id, self.k, known)
        hidden = self.drafter.hidden(
            ids.view(len(batch.anchors), -1),
            training_positions(batch.anchors, block),
            self.context,
            mask=self._mask,
            block=block,
        )
        return hidden.view(-1, block, hidden.shape[-1])

    @cached_property
    def _mask(self) -> Tensor | FlexMasks:
        batch, columns, block = self.batch, self.batch.features.shape[1], self.k + 1
        if self.flex or (self.flex is None and batch.anchors.is_cuda):
            from dflash_plugins.train.flex import FlexMasks  # seconds to import

            return FlexMasks(batch.anchors, batch.lengths, columns, block)
        return training_mask(batch.anchors, columns, block)

    def hidden(self, known: Tensor, slots: slice) -> Tensor:
        """See ``Backbone``."""
        return self.rows(known)[:, slots.start + 1 : slots.stop + 1]
