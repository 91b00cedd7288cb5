"""How a pair at hand relates to the rows: tested, untested or known to be bad; for reports and for a start-up log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from dflash_plugins.config import read_target_config
from dflash_plugins.config_models import fingerprint
from dflash_plugins.engines import parse_version
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.hub import HASHED, Model
from dflash_plugins.matrix.book import read_matrix
from dflash_plugins.matrix.rows import MatrixRow, RowModel

_NAMED = 3
_READ_AT_MOST = 1 << 30
"""Bytes of tensor files that are hashed to compare them with a row's: two seconds on a slow core."""

Status = Literal["tested", "untested", "known-bad"]


@dataclass(frozen=True)
class AtHand:
    """What is about to run. ``draft_fingerprint`` is that of the drafter's description.

    What is not known here (a model's weights, the target's description, the runner) is not compared.
    """

    engine: str
    engine_version: str
    target: Model
    draft: Model
    draft_fingerprint: str
    runner: str | None = None

    @cached_property
    def target_fingerprint(self) -> str | None:
        """Of the target's description, where it can be read."""
        try:
            return fingerprint(read_target_config(self.target.folder))
        except (BadInput, Refused):
            return None

    def differs(self, row: MatrixRow) -> str | None:
        """What ``row`` ran in the place of what is at hand; None where it ran the same."""
        if row.draft.fingerprint != self.draft_fingerprint:
            return "another revision of this drafter"
        if self.target_fingerprint not in (None, row.target.fingerprint):
            return "another target"
        if _other_weights(self.draft, row.draft):
            return "other weights of this drafter"
        return "other weights of this target" if _other_weights(self.target, row.target) else None


def _other_weights(model: Model, ran: RowModel) -> bool:
    """A commit and a hash cannot be compared; files are read only where the row has their hash, and if small."""
    if ran.revision is None or ran.revision.startswith(HASHED) != (model.revision is None):
        return False
    large = model.revision is None and sum(file.stat().st_size for file in model.files()) > _READ_AT_MOST
    return not large and model.weights not in (None, ran.revision)


class Standing(NamedTuple):
    """The status, the rows that say so, and of an untested pair what they ran in its place."""

    status: Status
    rows: tuple[MatrixRow, ...] = ()
    differs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The status in words, with the rows and what they ask for."""
        more = f" and {len(self.rows) - _NAMED} more" if len(self.rows) > _NAMED else ""
        names = ", ".join(row.id for row in self.rows[:_NAMED]) + more
        if self.status == "untested":
            return f"untested: {names} ran {' or '.join(self.differs)}" if self.rows else "untested"
        if self.status == "known-bad":
            return "known-bad: " + "; ".join(f"{row.id} ({row.reason})" for row in self.rows if row.result == "failed")
        least = floor(self.rows) or 1.0
        return f"tested, see {names}: at least {least:.2f} emitted per round are to be expected"

    def finding(self) -> Finding:
        """The same as a line of a report."""
        severity = {"tested": Severity.INFO, "known-bad": Severity.ERROR}.get(self.status, Severity.WARNING)
        mend = {
            "tested": f"to repeat it: {self.rows[0].command}" if self.rows else "",
            "known-bad": "use a tested pair",
            "untested": "run dflash-plugins prove on it before relying on it",
        }[self.status]
        return Finding(code="matrix", severity=severity, key="matrix", value=self.status, message=str(self), mend=mend)


def standing_of(rows: Iterable[MatrixRow], here: AtHand) -> Standing:
    """What the rows say of what is about to run; a failed row wins.

    Rows of another runner say nothing where both are known. An untested pair comes with the rows of this drafter, by
    name or by description, that ran something else.
    """
    near = [
        row
        for row in rows
        if (row.engine.name, _release(row.engine.version)) == (here.engine, _release(here.engine_version))
        and (None in (here.runner, row.engine.runner) or row.engine.runner == here.runner)
        and (row.draft.name == here.draft.label or row.draft.fingerprint == here.draft_fingerprint)
    ]
    said = [here.differs(row) for row in near]
    same = tuple(row for row, other in zip(near, said, strict=True) if other is None)
    if same:
        return Standing("known-bad" if any(row.result == "failed" for row in same) else "tested", same)
    return Standing("untested", tuple(near), tuple(dict.fromkeys(filter(None, said))))


def _release(version: str) -> str:
    """Without the local part, by which builds for CPUs and of forks differ."""
    parsed = parse_version(version)
    return version if parsed is None else parsed.public


def floor(rows: Iterable[MatrixRow]) -> float | None:
    """The least acceptance floor of the rows: prompts and temperatures differ, and nothing good falls below it."""
    return min((row.results.acceptance_floor for row in rows if row.results), default=None)


def log_standing(logger: logging.Logger, here: AtHand) -> None:
    """One line of an adapter's start: a warning for a pair known to be bad. A matrix that cannot be read is said so."""
    try:
        found = standing_of(read_matrix().rows, here)
    except BadInput as error:
        logger.warning("dflash-plugins: %s", error)
        return
    logger.log(logging.WARNING if found.status == "known-bad" else logging.INFO, "dflash-plugins: matrix: %s", found)
