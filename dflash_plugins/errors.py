"""Exceptions of the package, one tree.

DFlashPluginsError          the command line prints it and exits 2
  BadInput                  a file, a path or an argument is not usable
    Refused                 everything that is wrong at once, as findings
  EngineMissing             the engine asked for is not installed
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from dflash_plugins.findings import Finding, Severity, errors


class DFlashPluginsError(Exception):
    """Root of all errors that the package raises on purpose."""


class BadInput(DFlashPluginsError):
    """An input cannot be used; the message names it."""


class Refused(BadInput):
    """Several reasons at once. ``findings`` holds all of them, errors first."""

    def __init__(self, subject: str, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        lines = "\n".join(f"  {finding}" for finding in self.findings)
        super().__init__(f"{subject} is refused:\n{lines}")


class EngineMissing(DFlashPluginsError):
    """The engine asked for is not importable in this environment."""


def refuse_or_warn(subject: str, found: Collection[Finding], logger: logging.Logger) -> None:
    """``Refused`` with every error, or else every warning logged."""
    if wrong := errors(found):
        raise Refused(subject, wrong)
    for finding in found:
        if finding.severity is Severity.WARNING:
            logger.warning("dflash-plugins: %s", finding)
