"""The matrix for people: the table of the README, what ``matrix show`` prints, and what the two write and answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from dflash_plugins.errors import BadInput
from dflash_plugins.matrix.plan import Cell
from dflash_plugins.matrix.rows import MatrixRow, RowSpeed, schema_text
from dflash_plugins.whole_file import whole_file

if TYPE_CHECKING:
    from rich.console import Console

BEGIN = "<!-- matrix: written by `dflash-plugins matrix render` -->"
END = "<!-- /matrix -->"
SCHEMA = Path("dflash_plugins") / "compat_matrix.schema.json"
HEAD = (
    *("engine", "runner", "pins", "drafter", "method", "decoding", "K", "verdict", "emitted per round", "floor"),
    *("speed-up", "evidence", "date"),
)
_NUMBERS = ("K", "emitted per round", "floor")


class CellSummary(BaseModel):
    """A cell of the plan that has no row yet."""

    model_config = ConfigDict(frozen=True)

    id: str
    environment: str
    minutes: float
    command: str

    @classmethod
    def of(cls, cell: Cell) -> CellSummary:
        """Of a planned cell."""
        return cls(id=cell.id, environment=cell.place.environment, minutes=cell.minutes, command=cell.command())


class ShowReport(BaseModel):
    """Rows, and cells of the plan without one."""

    model_config = ConfigDict(frozen=True)

    rows: tuple[MatrixRow, ...]
    cells: tuple[CellSummary, ...]
    exit_code: int = 0

    def render(self, console: Console) -> None:
        """A table of the rows, and a line for each cell without one."""
        from rich.table import Table

        table = Table("id", "result", "emitted", "floor", "evidence", "date", "engine")
        for row in self.rows:
            cells = line(row)
            said = [cells[HEAD.index(name)] for name in ("verdict", "emitted per round", "floor", "evidence", "date")]
            table.add_row(row.id, *said, cells[0])
        if self.rows:
            console.print(table)
        for cell in self.cells:
            missing = f"{cell.id}: not run yet; in {cell.environment}, about {cell.minutes:.0f} minutes"
            console.print(missing, markup=False, highlight=False, soft_wrap=True)
        for row in self.rows if len(self.rows) == 1 else ():
            for text in (row.reason, *row.known_issues, row.command):
                if text:
                    console.print(text, markup=False, highlight=False, soft_wrap=True)


class RenderReport(BaseModel):
    """The files that ``render`` keeps, and which of them it has changed."""

    model_config = ConfigDict(frozen=True)

    files: tuple[str, ...]
    changed: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    exit_code: int = 0

    def render(self, console: Console) -> None:
        """One line per file."""
        for name in self.files:
            console.print(f"{name}: {'written' if name in self.changed else 'current'}", highlight=False)


def show(rows: Sequence[MatrixRow], cells: Iterable[Cell], identities: Sequence[str] = ()) -> ShowReport:
    """Rows, and cells without one; only those of ``identities`` where some are given, ``BadInput`` for unknown ones."""
    known = {row.id for row in rows}
    missing = [cell for cell in cells if cell.id not in known]
    if unknown := [one for one in identities if one not in known and one not in {cell.id for cell in missing}]:
        raise BadInput(f"neither a row nor a planned cell: {', '.join(unknown)}")
    wanted = set(identities)
    return ShowReport(
        rows=tuple(row for row in sorted(rows, key=_place) if not wanted or row.id in wanted),
        cells=tuple(CellSummary.of(cell) for cell in missing if not wanted or cell.id in wanted),
    )


def line(row: MatrixRow) -> tuple[str, ...]:
    """The cells of a row, in the order of ``HEAD``."""
    results, launch, engine = row.results, row.launch, row.engine
    pins = engine.pins + (", stand-ins" if engine.stubs else "")
    method = launch.method + (f" ({launch.mode})" if launch.mode else "")
    speed = None if results is None else results.speedup
    return (
        f"{engine.name} {engine.version}",
        engine.runner or "",
        pins,
        row.draft.name,
        method,
        launch.decoding,
        str(launch.k),
        verdict(row),
        "" if results is None else f"{results.emitted_per_round:.2f}",
        "" if results is None else f"{results.acceptance_floor:.2f}",
        "" if speed is None else speed_words(speed),
        row.evidence,
        row.date.isoformat(),
    )


def speed_words(speed: RowSpeed) -> str:
    """Speed-ups by requests at once, and what they were measured with."""
    ratios = ", ".join(f"{ratio:.2f} x at {at}" for at, ratio in sorted(speed.by_concurrency.items()))
    return f"{ratios} (K = {speed.k}, {speed.dtype})"


def verdict(row: MatrixRow) -> str:
    """What was found, in a few words."""
    if row.result == "failed" or row.results is None:
        return "FAILED"
    proof, test = row.results.proof, row.results.sampling
    if test is not None:
        return f"same law (p = {test.p:.2g}, TV from {test.smallest_detectable_tv:.2f} would show)"
    rounding = proof.ties + proof.numerical
    return f"same ids in {proof.tokens} tokens" + (f" but for {rounding} ties" if rounding else "")


def _place(row: MatrixRow) -> tuple[str, ...]:
    """Rows of an engine stand together, whenever they were run."""
    engine, launch = row.engine, row.launch
    return (engine.name, engine.version, engine.runner or "", launch.method, launch.decoding, row.id)


def markdown(rows: Sequence[MatrixRow]) -> str:
    """The table of the README; a sentence where there is no row."""
    if not rows:
        return "No row yet.\n"
    rules = ["---:" if name in _NUMBERS else "---" for name in HEAD]
    lines = [HEAD, rules, *(line(row) for row in sorted(rows, key=_place))]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in one)} |\n" for one in lines)


def with_table(text: str, rows: Sequence[MatrixRow]) -> str:
    """A document with the table between the two markers; ``BadInput`` where they are not there once each."""
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise BadInput(f"the document has to hold {BEGIN} and, after it, {END}, each once")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown(rows)}\n{END}{rest.partition(END)[2]}"


def render(root: Path, rows: tuple[MatrixRow, ...]) -> RenderReport:
    """Write the README's table and the published schema of a checkout, where they are not as they should be."""
    readme = root / "README.md"
    wanted = {readme: with_table(readme.read_text(encoding="utf-8"), rows), root / SCHEMA: schema_text()}
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        with whole_file(path) as partial:
            partial.write_text(wanted[path], encoding="utf-8")
    names = [path.relative_to(root).as_posix() for path in wanted]
    return RenderReport(
        files=tuple(names), changed=tuple(path.relative_to(root).as_posix() for path in changed), rows=rows
    )
