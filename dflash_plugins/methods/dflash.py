"""DFlash: one pass, every slot chosen by itself (methods.md section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.methods.base import Method, draft_in_passes, sampling_of, select_independently
from dflash_plugins.proposals import Proposals


def draft(
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
    """Draft K independent slots in one pass; arguments as in ``base.Draft``."""
    sampling = sampling_of(anchors, k, temperature, generator, uniforms)
    return draft_in_passes(drafter, anchors, positions, context, k, sampling, select_independently)


METHOD = Method("dflash", "one pass, each slot chosen by itself", ("DFlashDraftModel",), draft)
