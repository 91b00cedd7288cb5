"""DFlash 2: one pass with convolutions in the drafter, slots chosen by the selector's walk (methods.md section 3)."""

from __future__ import annotations

from dflash_plugins.methods.base import Method, one_pass, reference_draft

METHOD = Method(
    "dflash2",
    "one pass, slots chosen by the selector's walk",
    ("DFlash2DraftModel",),
    reference_draft(one_pass, walks=True),
)
