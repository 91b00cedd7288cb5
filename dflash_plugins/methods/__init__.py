"""The explicit catalogue of methods: one frozen record each, one file each, no registration by import."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dflash_plugins.config import DraftConfig
from dflash_plugins.methods import dflash, dflash2, dloop, dloop_extend
from dflash_plugins.methods.base import Method

METHODS: Mapping[str, Method] = MappingProxyType(
    {method.name: method for method in (dflash.METHOD, dflash2.METHOD, dloop.METHOD, dloop_extend.METHOD)}
)


def method_of(config: DraftConfig) -> Method:
    """The record that drafts with a drafter of this description."""
    if config.method != "dloop":
        return METHODS[config.method]
    # A D-Loop drafter without loop keys does not pass the reader of descriptions; "refine" is the mode without gate.
    mode = config.loop.mode if config.loop else "refine"
    return METHODS[f"dloop-{mode}"]


__all__ = ["METHODS", "Method", "method_of"]
