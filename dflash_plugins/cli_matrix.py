"""The commands ``dflash-plugins matrix``. As ``cli``: importing this module loads neither torch nor an engine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

matrix = typer.Typer(
    help="The compatibility matrix: which pair ran on which engine version, and how that went.", no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Rows = Annotated[
    list[str] | None, typer.Option("--row", metavar="ID", help="Of a row or a planned cell; may be given again.")
]


@matrix.command("show")
def matrix_show(row: Rows = None, as_json: AsJson = False) -> int:
    """List the rows, and the planned cells that have none yet."""
    from dflash_plugins.cli import finish
    from dflash_plugins.matrix import read_matrix
    from dflash_plugins.matrix.plan import planned
    from dflash_plugins.matrix.table import show

    return finish(show(read_matrix().rows, planned(), row or ()), as_json)


@matrix.command("run")
def matrix_run(
    row: Rows = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Write nothing; exit 1 where the verdict is not that of the row.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run cells, each in the environment of its engine, and write their rows; by default all that have none yet.

    Works in a checkout. A cell that fails is written as failed, with its reason; one that could not be run is not
    written (exit 2).
    """
    from dflash_plugins.cli import finish, quiet_stdout
    from dflash_plugins.errors import BadInput
    from dflash_plugins.matrix.run import checkout, chosen, run_cells

    if compare and not row:
        raise BadInput("--compare compares with rows: name them with --row")
    book = checkout() / "compat_matrix.yaml"
    with quiet_stdout():
        cells = chosen(row or (), book)
        report = run_cells(cells, book, compare=compare, tell=lambda line: print(line, file=sys.stderr, flush=True))
    return finish(report, as_json)


@matrix.command("render")
def matrix_render(as_json: AsJson = False) -> int:
    """Write the table of the README and the JSON schema of compat_matrix.yaml. Works in a checkout."""
    from dflash_plugins.cli import finish
    from dflash_plugins.matrix import read_matrix
    from dflash_plugins.matrix.run import checkout
    from dflash_plugins.matrix.table import render

    root = checkout()
    return finish(render(root, read_matrix(root / "compat_matrix.yaml").rows), as_json)
