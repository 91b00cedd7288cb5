"""The console script ``dflash-plugins``.

Importing this module and asking for help loads neither torch nor an engine: commands import what they need when run.
Results go to stdout, everything else to stderr. Exit code 0: done; 1: the answer is bad; 2: it could not run.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dflash_plugins.driver import Progress

DONE, BAD_ANSWER, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    help="DFlash, DFlash 2 and D-Loop block-diffusion drafting beside stock vLLM and SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models = typer.Typer(
    help="The embedded pair: a small real target and the drafters trained for it.", no_args_is_help=True
)
app.add_typer(models, name="models")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: that of the process) and returns its exit code; never raises on bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given, prog_name="dflash-plugins", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _could_not_run(error, given)
    return code if isinstance(code, int) else DONE


def _could_not_run(error: Exception, given: Sequence[str]) -> int:
    """One message on stderr, and with ``--json`` one document on stdout; a traceback only for a fault of our own."""
    from dflash_plugins.errors import DFlashPluginsError, Refused

    message = str(error) or type(error).__name__
    if hasattr(error, "format_message") and hasattr(error, "show"):  # typer's usage errors know the usage line
        message = error.format_message()
        error.show()
    elif isinstance(error, DFlashPluginsError):
        print(f"error: {message}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if "--json" in given:
        findings = [f.model_dump(mode="json") for f in error.findings] if isinstance(error, Refused) else []
        _print_json({"error": message, "findings": findings})
    return COULD_NOT_RUN


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=1, ensure_ascii=False), flush=True)


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Whatever a library prints meanwhile goes to stderr: stdout belongs to the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A callback that moves bars on stderr, one per stage; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Bars(console=console, disable=not console.is_terminal, transient=True) as bars:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield report


@models.command("list")
def models_list(as_json: AsJson = False) -> int:
    """List the embedded models: what they are, whether they are here, and where."""
    from dflash_plugins.pairs import listing

    rows = listing()
    if as_json:
        _print_json({"models": rows})
    else:
        _print_models(rows)
    return DONE


def _print_models(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        what = row.get("title") or f"{row['method']} drafter for {row['target']}"
        print(f"{row['name']:22} {row['kind']:8} {row['status']:14} {what} ({row['licence']})")
        print(f"{'':22} {row['path'] or 'models fetch ' + row['name']}")


@models.command("fetch")
def models_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `models list` shows.")],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write [default: the cache]")] = None,
    as_json: AsJson = False,
) -> int:
    """Make an embedded model available here and print its folder. Does nothing where it already is."""
    from dflash_plugins.pairs import fetch_model

    with _quiet_stdout(), _progress() as report:
        path = fetch_model(name, to=to, report=report)
    if as_json:
        _print_json({"name": name, "path": str(path)})
    else:
        print(path)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
