"""Cells of the matrix from outside: each in the environment of its engine, and what it answers into the book."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_plugins.errors import BadInput, DFlashPluginsError
from dflash_plugins.matrix.book import read_matrix, write_row
from dflash_plugins.matrix.plan import Cell, planned
from dflash_plugins.matrix.rows import MatrixRow

if TYPE_CHECKING:
    from rich.console import Console

LATE = 4
"""A cell is ended after this many times its usual duration."""


class Aborted(DFlashPluginsError):
    """A cell ended without a word about its pair; nothing is written."""


class RowRun(BaseModel):
    """What became of one cell. ``state`` is ``written``, ``compared``, or ``aborted`` with the reason in ``faults``.

    ``faults`` of a comparison say how the row differs from the recorded one.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    state: Literal["written", "compared", "aborted"]
    row: MatrixRow | None = None
    faults: tuple[str, ...] = ()


class RunReport(BaseModel):
    """What became of all cells that were asked for."""

    model_config = ConfigDict(frozen=True)

    runs: tuple[RowRun, ...]

    @property
    def exit_code(self) -> int:
        """2 when a cell could not be run, 1 when one failed or differs from its row, else 0."""
        if any(run.state == "aborted" for run in self.runs):
            return 2
        bad = [run for run in self.runs if run.faults or (run.state == "written" and run.row and run.row.reason)]
        return 1 if bad else 0

    def render(self, console: Console) -> None:
        """One line per cell."""
        for run in self.runs:
            said: str = "" if run.row is None else run.row.result
            said += "" if run.row is None or run.row.reason is None else f": {run.row.reason}"
            if run.row is not None and run.row.results is not None:
                results = run.row.results
                said += f", {results.emitted_per_round:.2f} emitted per round in {results.proof.tokens} tokens"
            line = " ".join(filter(None, [f"{run.id}: {run.state}", said, "; ".join(run.faults)]))
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if not self.runs:
            console.print("every cell has its row")


def checkout() -> Path:
    """The root of the checkout that this package is part of; ``BadInput`` where it is installed alone."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "ci" / "in-env").is_file():
        raise BadInput("matrix run and render work in a checkout of the project, where ci/in-env and README.md are")
    return root


Runner = Callable[[Cell], MatrixRow]


def run_cells(
    cells: Iterable[Cell],
    book: Path,
    *,
    compare: bool = False,
    runner: Runner | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> RunReport:
    """Run cells one after another and put their rows into ``book``; with ``compare`` nothing is written."""
    runs = []
    for cell in cells:
        tell(f"matrix: {cell.id} (in {cell.place.environment}, about {cell.minutes:.0f} min)")
        recorded = next((row for row in read_matrix(book).rows if row.id == cell.id), None)
        if compare and recorded is None:
            raise BadInput(f"{cell.id} has no row yet to compare with: run it without --compare first")
        try:
            row = (runner or in_environment)(cell.without_speed() if compare else cell)
        except Aborted as error:
            runs.append(RowRun(id=cell.id, state="aborted", faults=(str(error),)))
            continue
        if not compare:
            write_row(book, row)
        faults = tuple(differences(recorded, row)) if compare and recorded else ()
        runs.append(RowRun(id=cell.id, state="compared" if compare else "written", row=row, faults=faults))
    return RunReport(runs=tuple(runs))


def without_row(book: Path) -> list[Cell]:
    """The cells of the plan that have no row yet."""
    known = {row.id for row in read_matrix(book).rows}
    return [cell for cell in planned() if cell.id not in known]


def differences(recorded: MatrixRow, found: MatrixRow) -> list[str]:
    """What a new run contradicts: the verdict and, with the same weights, the floor of what is emitted per round.

    The tiny pairs are trained where they are run, and another CPU's rounding makes other weights of them.
    """
    faults = []
    if recorded.result != found.result:
        faults.append(f"the row says {recorded.result}, this run {found.result} ({found.reason or 'no reason'})")
    same = (recorded.target.revision, recorded.draft.revision) == (found.target.revision, found.draft.revision)
    if same and recorded.results and found.results:
        least, emitted = recorded.results.acceptance_floor, found.results.emitted_per_round
        if emitted < least:
            faults.append(f"{emitted:.3f} emitted per round, the row's floor is {least:.2f}")
    return faults


def in_environment(cell: Cell) -> MatrixRow:
    """The row of a cell that runs in a process of its own; ``Aborted`` where it does not answer with one."""
    root = checkout()
    argv = [str(root / "ci" / "in-env"), cell.place.environment, "--", *cell.program()]
    process = subprocess.Popen(  # noqa: S603 - argv is ours
        argv, cwd=root, stdout=subprocess.PIPE, env=outer_variables(os.environ), start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=60 * LATE * cell.minutes)
    except subprocess.TimeoutExpired as error:
        raise Aborted(f"not done after {LATE * cell.minutes:.0f} minutes") from error
    finally:
        _end(process)
    return answer_of(output, process.returncode)


def outer_variables(here: Mapping[str, str]) -> dict[str, str]:
    """Without what an environment around this process adds: another one is about to be entered."""
    inner = [str(checkout() / ".in-env"), *([sys.prefix] if sys.prefix != sys.base_prefix else [])]
    path = [one for one in here.get("PATH", os.defpath).split(os.pathsep) if not one.startswith(tuple(inner))]
    dropped = {"PYTHONPATH", "VIRTUAL_ENV", "PATH"}
    return {key: value for key, value in here.items() if key not in dropped} | {"PATH": os.pathsep.join(path)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also what the process has started: engines have sessions of their own, and end with their parent's pipe."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answer_of(output: bytes, code: int) -> MatrixRow:
    """The row in what a cell's process has printed."""
    try:
        document: dict[str, Any] = json.loads(output)
        if "row" in document:
            return MatrixRow.model_validate(document["row"])
        raise Aborted(str(document["aborted"]))
    except (ValueError, KeyError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"exit code {code}, no answer"
        raise Aborted(f"its process ended without a row ({reason}); its own output says why") from error


def chosen(identities: Sequence[str], book: Path) -> list[Cell]:
    """The cells of these ids, by default those without a row; ``BadInput`` naming all that are unknown."""
    cells = {cell.id: cell for cell in planned()}
    if unknown := [identity for identity in identities if identity not in cells]:
        raise BadInput(f"no cell of the plan: {', '.join(unknown)}; there are {', '.join(cells)}")
    return [cells[identity] for identity in identities] if identities else without_row(book)
