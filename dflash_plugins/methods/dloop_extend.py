"""D-Loop, mode "extend": block after block (second-hand, arXiv 2610.07659; methods.md section 4). Not served yet."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import Refused
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.methods.base import Method
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
    """Always raises Refused: which row of a block stands for which position is not settled, so nothing is guessed."""
    finding = Finding(
        code="loop-mode",
        severity=Severity.ERROR,
        key="dflash_config.dloop.mode",
        value="extend",
        message="this mode is not served yet",
        mend='use mode "refine", or serve the backbone without dflash_config.dloop',
    )
    raise Refused("D-Loop (extend)", [finding])


METHOD = Method("dloop-extend", "block after block; not served yet", ("DLoopDraftModel",), draft, "extend")
