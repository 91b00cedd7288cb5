"""The compatibility matrix: which pair ran on which engine version, and how a pair at hand relates to those rows."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity

Status = Literal["tested", "untested revision", "untested", "known-bad"]


class MatrixRow(BaseModel):
    """One run. ``draft_fingerprint`` is ``DraftConfig.fingerprint``: another revision is another row."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    engine: Literal["vllm", "sglang"]
    engine_version: str
    method: Literal["dflash", "dflash2", "dloop"]
    target: str
    draft: str
    draft_fingerprint: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    k: int = Field(gt=0)
    platform: str
    date: datetime.date
    result: Literal["passed", "failed"]
    note: str = ""


class Matrix(BaseModel):
    """The file ``compat_matrix.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: tuple[MatrixRow, ...]


def read_matrix(path: Path | None = None) -> Matrix:
    """The matrix in ``path``, or the one that is shipped; ``BadInput`` naming the file and every fault."""
    source = files("dflash_plugins").joinpath("compat_matrix.yaml") if path is None else path
    try:
        matrix = Matrix.model_validate(yaml.safe_load(source.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(f"{source} cannot be read: {error}") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise BadInput(f"{source} is no matrix: {faults}") from error
    ids = [row.id for row in matrix.rows]
    if len(set(ids)) != len(ids):
        raise BadInput(f"{source} uses an id twice: {sorted({i for i in ids if ids.count(i) > 1})}")
    return matrix


def status(
    rows: Iterable[MatrixRow], *, engine: str, engine_version: str, draft: str, draft_fingerprint: str
) -> tuple[Status, tuple[MatrixRow, ...]]:
    """What the rows say about a drafter on an engine version, and the rows that say it; a failed row wins."""
    here = [row for row in rows if (row.engine, row.engine_version) == (engine, engine_version)]
    same = tuple(row for row in here if row.draft_fingerprint == draft_fingerprint)
    if same:
        return ("known-bad" if any(row.result == "failed" for row in same) else "tested"), same
    other = tuple(row for row in here if row.draft == draft)
    return ("untested revision" if other else "untested"), other


def status_finding(state: Status, rows: tuple[MatrixRow, ...]) -> Finding:
    """The same as a line of a report."""
    severity = {"tested": Severity.INFO, "known-bad": Severity.ERROR}.get(state, Severity.WARNING)
    message = f"{state}" + (f", see row {', '.join(row.id for row in rows)}" if rows else "")
    mend = "use a tested pair" if state == "known-bad" else "run dflash-plugins prove on it before relying on it"
    return Finding(code="matrix", severity=severity, key="matrix", value=state, message=message, mend=mend)
