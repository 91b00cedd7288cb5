"""Entry point of SGLang's plugin group. Nothing is supported yet; it says so once and changes nothing."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Say once per process that SGLang is not supported yet. Never raises, changes nothing, imports no engine."""
    logger.warning("dflash-plugins: SGLang is not yet supported, nothing is registered")
