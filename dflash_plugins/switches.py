"""Environment variables that both adapters read when an engine loads its plugins. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

DISABLE = "DFLASH_PLUGINS_DISABLE"
"""True: nothing is registered."""

AUDIT = "DFLASH_PLUGINS_AUDIT"
"""Names the file that takes the audit of every round, see ``dflash_plugins.audit``."""

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def read_switches(environment: Mapping[str, str], names: Sequence[str]) -> tuple[bool, ...]:
    """Values of the switches ``names``, off where unset; ValueError naming each that is neither true nor false."""
    texts = {name: environment.get(name, "").strip().lower() for name in names}
    wrong = [f"{name}={environment[name]!r}" for name, text in texts.items() if text not in _TRUE | _FALSE]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: neither true nor false; use 1 or 0")
    return tuple(text in _TRUE for text in texts.values())


def audit_file(environment: Mapping[str, str]) -> str | None:
    """The file that is to take the audit, or None where none is asked for."""
    return environment.get(AUDIT, "").strip() or None


def log_disabled(environment: Mapping[str, str], logger: logging.Logger) -> None:
    """Say that nothing is registered; an error where an audit was asked for, which cannot be then."""
    audit = f", and nothing is audited although {AUDIT} is set" if AUDIT in environment else ""
    level = logging.ERROR if audit else logging.INFO
    logger.log(level, "dflash-plugins: %s is set, nothing is registered%s", DISABLE, audit)
