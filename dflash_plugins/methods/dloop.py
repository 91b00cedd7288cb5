"""D-Loop, mode "refine": the drafter is run again on the tokens it has just selected (methods.md section 4).

This mode is our reading of the reference description; no official weights have been seen, and the config keys are ours.
"""

from __future__ import annotations

import warnings
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from dflash_plugins.config import LoopConfig
from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.methods.base import Method, Select, draft_in_passes, sampling_of, select_independently
from dflash_plugins.methods.dflash2 import select_by_walk
from dflash_plugins.pair import served_prefix_lengths
from dflash_plugins.proposals import Proposals


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _served_prefixes(loop: LoopConfig, k: int) -> tuple[int, ...]:
    lengths = loop.prefix_lengths
    if any(low >= high for low, high in pairwise((0, *lengths))):
        raise BadInput(f"prefix_lengths {list(lengths)} must rise strictly from above 0")
    kept, findings = served_prefix_lengths(loop, k)
    for finding in findings:
        _warn_once(f"D-Loop (refine): {finding}")
    return kept


def _selection(drafter: Drafter) -> Select:
    return select_independently if drafter.candidate_selector is None else select_by_walk


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
    """Draft K slots in one pass per prefix and a last one; arguments as in ``base.Draft``.

    Tokens once selected stay, and q of a token is that of the pass that selected it.
    """
    loop = drafter.config.loop
    if loop is None or loop.mode != "refine":
        raise BadInput(f"this drafter describes no refine loop: dflash_config.dloop is {loop}")
    prefixes = _served_prefixes(loop, k)
    sampling = sampling_of(anchors, k, temperature, generator, uniforms)
    return draft_in_passes(drafter, anchors, positions, context, k, sampling, _selection(drafter), prefixes)


METHOD = Method(
    "dloop-refine",
    "one pass per prefix, each reading the tokens selected before",
    ("DLoopDraftModel",),
    draft,
    "refine",
)
