"""DFlash 2: one pass with convolutions in the drafter, slots chosen by the selector's walk (methods.md section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.methods.base import Method, Sampling, Selected, draft_in_passes, sampling_of
from dflash_plugins.proposals import OneHot, Proposals, Sparse
from dflash_plugins.selector import candidates, walk


def select_by_walk(drafter: Drafter, hidden: Tensor, logits: Tensor, previous: Tensor, sampling: Sampling) -> Selected:
    """Keep the best candidates of each slot and walk through them; q is the row each token was drawn from."""
    selector = drafter.candidate_selector
    if selector is None:
        raise BadInput("this drafter has no selector: it is no DFlash 2 drafter")
    unary, draft_ids = candidates(logits, selector.top_k)
    ids = drafter.target_ids(draft_ids)
    walked = walk(selector, hidden, ids, unary, previous, sampling.temperature, sampling.uniforms)
    return Selected(walked.ids, OneHot() if sampling.uniforms is None else Sparse(ids, walked.probs))


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
    """Draft K slots in one pass and walk; arguments as in ``base.Draft``."""
    sampling = sampling_of(anchors, k, temperature, generator, uniforms)
    return draft_in_passes(drafter, anchors, positions, context, k, sampling, select_by_walk)


METHOD = Method("dflash2", "one pass, slots chosen by the selector's walk", ("DFlash2DraftModel",), draft)
