"""D-Loop, mode "refine": the drafter is run again on the tokens it has just selected (methods.md section 4).

This mode is our reading of the reference description; no official weights have been seen, and the config keys are ours.
"""

from __future__ import annotations

import warnings
from functools import cache
from itertools import pairwise

from dflash_plugins.config import LoopConfig
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.methods.base import Method
from dflash_plugins.pair import served_prefix_lengths


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


def _prefixes(drafter: Drafter, k: int) -> tuple[int, ...]:
    loop = drafter.config.loop
    if loop is None or loop.mode != "refine":
        raise BadInput(f"this drafter describes no refine loop: dflash_config.dloop is {loop}")
    return _served_prefixes(loop, k)


METHOD = Method(
    "dloop-refine",
    "one pass per prefix, each reading the tokens selected before",
    ("DLoopDraftModel",),
    _prefixes,
    "refine",
)
