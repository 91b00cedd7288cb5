"""How a pair at hand relates to the rows: tested, untested or known to be bad; for reports and for a start-up log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

from dflash_plugins.engines import parse_version
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.matrix.book import read_matrix
from dflash_plugins.matrix.rows import MatrixRow

_NAMED = 3

Status = Literal["tested", "untested", "known-bad"]


def status(
    rows: Iterable[MatrixRow],
    *,
    engine: str,
    engine_version: str,
    draft: str,
    draft_fingerprint: str,
    runner: str | None = None,
) -> tuple[Status, tuple[MatrixRow, ...]]:
    """What the rows say about a drafter on a release of an engine, and the rows that say it; a failed row wins.

    Rows of another runner say nothing where both are known. An untested pair comes with the rows of another revision of
    the drafter of that name.
    """
    here = [
        row
        for row in rows
        if (row.engine.name, _release(row.engine.version)) == (engine, _release(engine_version))
        and (None in (runner, row.engine.runner) or row.engine.runner == runner)
    ]
    same = tuple(row for row in here if row.draft.fingerprint == draft_fingerprint)
    if same:
        return ("known-bad" if any(row.result == "failed" for row in same) else "tested"), same
    return "untested", tuple(row for row in here if row.draft.name == draft)


def _release(version: str) -> str:
    """Without the local part, by which builds for CPUs and of forks differ."""
    parsed = parse_version(version)
    return version if parsed is None else parsed.public


def floor(rows: Iterable[MatrixRow]) -> float | None:
    """The least acceptance floor of the rows: prompts and temperatures differ, and nothing good falls below it."""
    return min((row.results.acceptance_floor for row in rows if row.results), default=None)


def statement(state: Status, rows: tuple[MatrixRow, ...]) -> str:
    """The status in words, with the rows and what they ask for."""
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    names = ", ".join(row.id for row in rows[:_NAMED]) + more
    if state == "untested":
        return f"untested: {names} ran another revision of this drafter" if rows else "untested"
    if state == "known-bad":
        return "known-bad: " + "; ".join(f"{row.id} ({row.reason})" for row in rows if row.result == "failed")
    least = floor(rows) or 1.0
    return f"tested, see {names}: at least {least:.2f} emitted per round are to be expected"


def status_finding(state: Status, rows: tuple[MatrixRow, ...]) -> Finding:
    """The same as a line of a report."""
    severity = {"tested": Severity.INFO, "known-bad": Severity.ERROR}.get(state, Severity.WARNING)
    mend = {
        "tested": f"to repeat it: {rows[0].command}" if rows else "",
        "known-bad": "use a tested pair",
        "untested": "run dflash-plugins prove on it before relying on it",
    }[state]
    return Finding(
        code="matrix", severity=severity, key="matrix", value=state, message=statement(state, rows), mend=mend
    )


def log_status(
    logger: logging.Logger,
    *,
    engine: str,
    engine_version: str,
    draft: str,
    draft_fingerprint: str,
    runner: str | None = None,
) -> None:
    """One line of an adapter's start: a warning for a pair known to be bad. A matrix that cannot be read is said so."""
    try:
        rows = read_matrix().rows
    except BadInput as error:
        logger.warning("dflash-plugins: %s", error)
        return
    asked = {"engine": engine, "engine_version": engine_version, "draft": draft, "runner": runner}
    state, found = status(rows, draft_fingerprint=draft_fingerprint, **asked)  # type: ignore[arg-type]
    level = logging.WARNING if state == "known-bad" else logging.INFO
    logger.log(level, "dflash-plugins: matrix: %s", statement(state, found))
