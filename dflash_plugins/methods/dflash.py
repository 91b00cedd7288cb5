"""DFlash: one pass, every slot chosen by itself (methods.md section 2)."""

from __future__ import annotations

from dflash_plugins.methods.base import Method

METHOD = Method("dflash", "one pass, each slot chosen by itself", ("DFlashDraftModel",))
