"""D-Loop, mode "extend": block after block (second-hand, arXiv 2610.07659; methods.md section 4). Not served yet."""

from __future__ import annotations

from typing import NoReturn

from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import Refused
from dflash_plugins.methods.base import Method
from dflash_plugins.pair import loop_mode_finding


def _refuse(_drafter: Drafter, _k: int) -> NoReturn:
    """Always raises Refused: which row of a block stands for which position is not settled, so nothing is guessed."""
    raise Refused("D-Loop (extend)", [loop_mode_finding("extend")])


METHOD = Method("dloop-extend", "block after block; not served yet", ("DLoopDraftModel",), _refuse, "extend")
