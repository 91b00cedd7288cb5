"""The compatibility matrix: its schema, its file, and what it says about a pair."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_rows import PRINT_A, PRINT_B, document, results, row, rows
from safetensors.torch import save_file

from dflash_plugins.config import read_target_config
from dflash_plugins.config_models import fingerprint
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Severity
from dflash_plugins.hub import Model
from dflash_plugins.matrix import AtHand, Standing, book, log_standing, read_matrix, standing_of
from dflash_plugins.matrix.rows import MatrixRow, acceptance_floor, schema_text
from dflash_plugins.matrix.table import SCHEMA, with_table

EMPTY = "# a comment\nrows: []\n"


def written(directory: Path, documents: list[dict[str, Any]]) -> Path:
    file = directory / "matrix.yaml"
    file.write_text(yaml.safe_dump({"rows": documents}))
    return file


# -- the file


def test_the_shipped_matrix_schema_and_table_are_current(repository):
    """After a change of rows or of the models: dflash-plugins matrix render."""
    shipped = read_matrix()
    readme = (repository / "README.md").read_text()
    assert read_matrix(repository / "compat_matrix.yaml") == shipped
    assert (repository / SCHEMA).read_text() == schema_text()
    assert with_table(readme, shipped.rows) == readme


def test_rows_are_read(tmp_path):
    assert read_matrix(written(tmp_path, [document()])).rows == (row(),)


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([document(engine__name="tgi")], r"rows\.0\.engine\.name"),
        ([document(draft__fingerprint="abc")], r"rows\.0\.draft\.fingerprint"),
        ([document(surprise=1)], r"rows\.0\.surprise"),
        ([document(launch__surprise=1)], r"rows\.0\.launch\.surprise"),
        ([{k: v for k, v in document().items() if k != "launch"}], r"rows\.0\.launch"),
        ([document(engine__pins="overridden")], "requirements are listed"),
        ([document(result="failed", reason=None)], "says its reason"),
        ([document(reason="why")], "no reason"),
        ([document(results=None)], "results that are lossless"),
        ([document(results=results(lossless=False))], "results that are lossless"),
        ([document(), document()], "id twice"),
    ],
)
def test_faulty_rows_are_named(tmp_path, documents, words):
    with pytest.raises(BadInput, match=words):
        read_matrix(written(tmp_path, documents))


@pytest.mark.parametrize("text", ["rows: [", "[]", "{}", "rows: 3"])
def test_a_broken_file_is_bad_input(tmp_path, text):
    file = tmp_path / "matrix.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"matrix\.yaml"):
        read_matrix(file)
    with pytest.raises(BadInput, match=r"none\.yaml"):
        read_matrix(tmp_path / "none.yaml")


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4, unique_by=lambda one: one.id), st.data())
def test_rows_survive_the_file_and_the_others_stay_byte_for_byte(known: list[MatrixRow], data: st.DataObject) -> None:
    text = EMPTY
    for one in known:
        text = book.with_row(text, one)
    assert text.startswith("# a comment\nrows:\n")
    assert book.parse_matrix(text, "x").rows == tuple(known)
    at = data.draw(st.integers(0, len(known) - 1))
    changed = data.draw(rows).model_copy(update={"id": known[at].id})
    after = book.with_row(text, changed)
    before, _, rest = text.partition(book.row_text(known[at]))
    assert after == before + book.row_text(changed) + rest


def test_a_row_is_written_through_the_link_of_the_package_and_whole(tmp_path, monkeypatch):
    file, link = tmp_path / "compat_matrix.yaml", tmp_path / "package" / "compat_matrix.yaml"
    file.write_text(EMPTY)
    link.parent.mkdir()
    link.symlink_to("../compat_matrix.yaml")
    book.write_row(link, row("r1"))
    book.write_row(link, row("r2"))
    assert link.is_symlink()
    assert [one.id for one in read_matrix(file).rows] == ["r1", "r2"]
    text = file.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(type(file), "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(BadInput, match="disk full"):
            book.write_row(link, row("r3"))
    assert file.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compat_matrix.yaml", "package"]


def test_rows_that_somebody_has_laid_out_otherwise_are_left_alone(tmp_path):
    text = yaml.safe_dump({"rows": [document()]})  # sorted keys: no row begins with its id
    with pytest.raises(BadInput, match="not laid out"):
        book.with_row(text, row("r2"))


@pytest.mark.parametrize(("emitted", "expected"), [(1.0, 1.0), (1.05, 1.0), (1.6, 1.44), (2.0, 1.8), (1.5931, 1.43)])
def test_the_floor_is_nine_tenths(emitted, expected):
    assert acceptance_floor(emitted) == expected


# -- what it says


TARGET, DRAFT = (Model(name, Path("nowhere")) for name in ("org/target", "org/drafter"))


def at_hand(
    version: str = "0.31.0",
    fingerprint: str = PRINT_A,
    runner: str | None = None,
    target: Model = TARGET,
    draft: Model = DRAFT,
) -> AtHand:
    return AtHand("vllm", version, target, draft, fingerprint, runner)


def said(*known: MatrixRow, **here: Any):
    found = standing_of(known, at_hand(**here))
    return found.status, [one.id for one in found.rows]


def test_f05_another_revision_is_not_tested():
    assert said(row()) == ("tested", ["r1"])
    assert said(row(), fingerprint=PRINT_B) == ("untested", ["r1"])
    assert "r1 ran another revision" in str(standing_of([row()], at_hand(fingerprint=PRINT_B)))


def test_another_target_is_not_tested(tmp_path):
    folder = tiny.write_target(tmp_path / "target")
    known = row(target__fingerprint=fingerprint(read_target_config(folder)))
    assert said(known, target=Model("org/target", folder)) == ("tested", ["r1"])
    assert said(row(), target=Model("org/target", folder)) == ("untested", ["r1"])
    assert "r1 ran another target" in str(standing_of([row()], at_hand(target=Model("org/target", folder))))


@pytest.mark.parametrize("part", ["target", "draft"])
def test_other_weights_under_the_same_description_are_not_tested(tmp_path, monkeypatch, part):
    weights = {"x": torch.zeros(3)}
    save_file(weights, tmp_path / "model.safetensors")
    local = Model(str(tmp_path), tmp_path)
    same = row(**{f"{part}__revision": local.weights})
    assert said(same, **{part: local}) == ("tested", ["r1"])
    save_file(weights | {"x": torch.ones(3)}, tmp_path / "model.safetensors")
    other = Model(str(tmp_path), tmp_path)
    assert said(same, **{part: other}) == ("untested", ["r1"])
    monkeypatch.setattr("dflash_plugins.matrix.standing._READ_AT_MOST", 10)
    assert said(same, **{part: other}) == ("tested", ["r1"])  # too large to be read for a check
    monkeypatch.undo()
    kind = {"target": "target", "draft": "drafter"}[part]
    assert f"r1 ran other weights of this {kind}" in str(standing_of([same], at_hand(**{part: other})))


def test_commits_are_compared_with_commits_only():
    here = Model.told("org/drafter", "a" * 40)
    assert said(row(draft__revision="a" * 40), draft=here) == ("tested", ["r1"])
    assert said(row(draft__revision="b" * 40), draft=here) == ("untested", ["r1"])
    assert said(row(draft__revision="weights-0123456789abcdef"), draft=here) == ("tested", ["r1"])
    assert said(row(draft__revision="b" * 40), draft=Model.told("org/drafter", "main")) == ("tested", ["r1"])


def test_other_versions_runners_and_failures():
    assert said(row(), version="0.32.0") == ("untested", [])
    assert said(row(), version="0.31.0+cpu") == ("tested", ["r1"])
    assert said(row(), runner="v2") == ("untested", [])
    assert said(row(engine__runner=None), runner="v2") == ("tested", ["r1"])
    assert said(row(), row("r2", result="failed")) == ("known-bad", ["r1", "r2"])
    assert said() == ("untested", [])


def test_status_as_a_finding():
    tested = Standing("tested", (row(), row("r2", results=results(1.2)))).finding()
    assert tested.severity is Severity.INFO
    assert "at least 1.08 emitted per round" in tested.message
    assert row().command in tested.mend
    assert Standing("untested").finding().severity is Severity.WARNING
    bad = Standing("known-bad", (row(result="failed"),)).finding()
    assert (bad.severity, bad.message) == (Severity.ERROR, "known-bad: r1 (it broke)")


@pytest.mark.parametrize(("result", "level", "words"), [("passed", 20, "at least 1.44"), ("failed", 30, "it broke")])
def test_a_start_says_what_the_matrix_says(monkeypatch, caplog, result, level, words):
    monkeypatch.setattr("dflash_plugins.matrix.standing.read_matrix", lambda: book.Matrix(rows=(row(result=result),)))
    with caplog.at_level(logging.INFO):
        log_standing(logging.getLogger("x"), at_hand())
    (record,) = caplog.records
    assert (record.levelno, words in record.getMessage()) == (level, True)


def test_a_start_survives_a_matrix_that_cannot_be_read(monkeypatch, caplog):
    def broken():
        raise BadInput("no matrix")

    monkeypatch.setattr("dflash_plugins.matrix.standing.read_matrix", broken)
    log_standing(logging.getLogger("x"), at_hand())
    assert "no matrix" in caplog.text
