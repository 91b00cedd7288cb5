"""The compatibility matrix: its schema, and what it says about a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Severity
from dflash_plugins.matrix import MatrixRow, read_matrix, status, status_finding

PRINT_A, PRINT_B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
ROW: dict[str, Any] = {
    "id": "r1",
    "engine": "vllm",
    "engine_version": "0.31.0",
    "method": "dflash",
    "target": "org/target",
    "draft": "org/drafter",
    "draft_fingerprint": PRINT_A,
    "k": 7,
    "platform": "cpu",
    "date": "2026-10-11",
    "result": "passed",
}


def written(directory: Path, rows: list[dict[str, Any]]) -> Path:
    file = directory / "matrix.yaml"
    file.write_text(yaml.safe_dump({"rows": rows}))
    return file


def said(*rows: dict[str, Any], version: str = "0.31.0", fingerprint: str = PRINT_A) -> tuple[str, list[str]]:
    parsed = [MatrixRow(**row) for row in rows]
    state, by = status(
        parsed, engine="vllm", engine_version=version, draft="org/drafter", draft_fingerprint=fingerprint
    )
    return state, [row.id for row in by]


def test_the_shipped_matrix_is_valid() -> None:
    matrix = read_matrix()
    for row in matrix.rows:
        assert row.draft_fingerprint.startswith("sha256:")


def test_rows_are_read(tmp_path: Path) -> None:
    assert read_matrix(written(tmp_path, [ROW])).rows == (MatrixRow(**ROW),)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROW | {"engine": "tgi"}], "rows.0.engine"),
        ([ROW | {"draft_fingerprint": "abc"}], "rows.0.draft_fingerprint"),
        ([ROW | {"surprise": 1}], "rows.0.surprise"),
        ([{k: v for k, v in ROW.items() if k != "k"}], "rows.0.k"),
        ([ROW, ROW], "id twice"),
    ],
)
def test_faulty_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_matrix(written(tmp_path, rows))


@pytest.mark.parametrize("text", ["rows: [", "[]", "{}"])
def test_a_broken_file_is_bad_input(tmp_path: Path, text: str) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"matrix\.yaml"):
        read_matrix(file)
    with pytest.raises(BadInput, match=r"none\.yaml"):
        read_matrix(tmp_path / "none.yaml")


def test_f05_another_revision_is_not_tested() -> None:
    assert said(ROW) == ("tested", ["r1"])
    assert said(ROW, fingerprint=PRINT_B) == ("untested revision", ["r1"])


def test_other_versions_and_failures() -> None:
    assert said(ROW, version="0.32.0") == ("untested", [])
    assert said(ROW, ROW | {"id": "r2", "result": "failed"}) == ("known-bad", ["r1", "r2"])
    assert said() == ("untested", [])


def test_status_as_a_finding() -> None:
    row = MatrixRow(**ROW)
    assert status_finding("tested", (row,)).severity is Severity.INFO
    assert status_finding("untested revision", (row,)).severity is Severity.WARNING
    assert "r1" in status_finding("known-bad", (row,)).message
    assert status_finding("known-bad", (row,)).severity is Severity.ERROR
