"""DFlash 2: one pass with convolutions in the drafter, slots chosen by the selector's walk (methods.md section 3)."""

from __future__ import annotations

from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.methods.base import Method


def _one_walk(drafter: Drafter, _k: int) -> tuple[int, ...]:
    if drafter.candidate_selector is None:
        raise BadInput("this drafter has no selector: it is no DFlash 2 drafter")
    return ()


METHOD = Method("dflash2", "one pass, slots chosen by the selector's walk", ("DFlash2DraftModel",), _one_walk)
