"""Reading and writing ``compat_matrix.yaml``. A row is put in by exchanging its lines; all others stay as they are."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml
from pydantic import ValidationError

from dflash_plugins.errors import BadInput
from dflash_plugins.matrix.rows import Matrix, MatrixRow
from dflash_plugins.whole_file import whole_file

_START = "- id: "
_EMPTY, _FULL = "rows: []", "rows:"


def read_matrix(path: Path | None = None) -> Matrix:
    """The matrix in ``path``, or the one that is shipped; ``BadInput`` naming the file and every fault."""
    source: Traversable = files("dflash_plugins").joinpath("compat_matrix.yaml") if path is None else path
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadInput(f"{source} cannot be read: {error}") from error
    return parse_matrix(text, str(source))


def parse_matrix(text: str, source: str) -> Matrix:
    """The matrix in ``text``; ``BadInput`` naming ``source`` and every fault."""
    try:
        matrix = Matrix.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise BadInput(f"{source} cannot be read: {error}") from error
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise BadInput(f"{source} is no matrix: {faults}") from error
    ids = [row.id for row in matrix.rows]
    if len(set(ids)) != len(ids):
        raise BadInput(f"{source} uses an id twice: {sorted({i for i in ids if ids.count(i) > 1})}")
    return matrix


def row_text(row: MatrixRow) -> str:
    """The lines of a row; what is not known is left out."""
    document = row.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump([document], sort_keys=False, width=120, allow_unicode=True)


def with_row(text: str, row: MatrixRow, source: str = "the matrix") -> str:
    """``text`` of a matrix with ``row`` in the place of the one with its id, or else at its end."""
    before = parse_matrix(text, source)
    head, blocks = _blocks(text)
    at = next((n for n, known in enumerate(before.rows) if known.id == row.id), len(blocks))
    if len(blocks) != len(before.rows):
        raise BadInput(f"{source} is not laid out as matrix run writes it: a row has to begin with {_START!r}")
    after = head + "".join([*blocks[:at], row_text(row), *blocks[at + 1 :]])
    expected = (*before.rows[:at], row, *before.rows[at + 1 :])
    if parse_matrix(after, source).rows != expected:
        raise BadInput(f"{source} would not hold the row {row.id} as it is")
    return after


def _blocks(text: str) -> tuple[str, list[str]]:
    """Everything before the first row, and the lines of each row."""
    lines = list(io.StringIO(text, newline="\n"))  # no other character ends a line of the file
    starts = [number for number, line in enumerate(lines) if line.startswith(_START)]
    head = "".join(lines[: starts[0]] if starts else lines)
    if not starts:
        head = head.rstrip("\n").removesuffix(_EMPTY).removesuffix(_FULL) + f"{_FULL}\n"
    elif not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    ends = [*starts[1:], len(lines)][: len(starts)]
    return head, ["".join(lines[first:last]) for first, last in zip(starts, ends, strict=True)]


def write_row(path: Path, row: MatrixRow) -> None:
    """Put ``row`` into the file: whole or not at all, one writer at a time."""
    path = path.resolve()  # the package holds a link to the file
    with _locked(path.parent):
        text = with_row(path.read_text(encoding="utf-8"), row, str(path))
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
