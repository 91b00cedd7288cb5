"""The console script ``dflash-plugins``.

Importing this module and asking for help loads neither torch nor an engine: commands import what they need when run.
Results go to stdout, everything else to stderr. Exit code 0: done; 1: the answer is bad; 2: it could not run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from dflash_plugins.cli_matrix import matrix

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_plugins.driver import Progress
    from dflash_plugins.train.run import TrainReport

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
app.add_typer(matrix, name="matrix")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
K = Annotated[
    int | None, typer.Option("--k", min=1, metavar="N", help="Proposals per round, the same on every engine.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A flag of the engine, with underscores; for train, of the recipe."
    ),
]


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
def quiet_stdout() -> Iterator[None]:
    """Whatever a library prints meanwhile goes to stderr: stdout belongs to the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A callback that moves bars on stderr, one per stage; silent where stderr is no terminal.

    What a stage says after a colon may change from call to call.
    """
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Bars(console=console, disable=not console.is_terminal, transient=True) as bars:

        def report(stage: str, done: int, total: int) -> None:
            name = stage.partition(":")[0]
            if name not in tasks:
                tasks[name] = bars.add_task(stage, total=None)
            bars.update(tasks[name], description=stage, completed=done, total=total or None)

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
        if row.get("base"):
            what += f", shipped as a difference to {row['base']}"
        if row.get("superseded_by"):
            what += f", superseded by {row['superseded_by']}"
        print(f"{row['name']:26} {row['kind']:8} {row['status']:14} {what} ({row['licence']})")
        print(f"{'':26} {row['path'] or 'models fetch ' + row['name']}")


@models.command("fetch")
def models_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `models list` shows.")],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write [default: the cache]")] = None,
    as_json: AsJson = False,
) -> int:
    """Make an embedded model available here and print its folder. Does nothing where it already is."""
    from dflash_plugins.pairs import fetch_model

    with quiet_stdout(), _progress() as report:
        path = fetch_model(name, to=to, report=report)
    if as_json:
        _print_json({"name": name, "path": str(path)})
    else:
        print(path)
    return DONE


@app.command()
def demo(
    engine: Annotated[str, typer.Option(metavar="E", help="The engine that decodes.")] = "vllm",
    k: K = None,
    as_json: AsJson = False,
) -> int:
    """Decode nine fixed prompts with the embedded target, plainly and with its drafters, and compare text and speed."""
    from dflash_plugins.demo import TARGET, run
    from dflash_plugins.driver import find_driver
    from dflash_plugins.pairs import resolve

    with quiet_stdout(), _progress() as report:
        find_driver(engine)  # before a download: without the engine there is nothing to show
        resolve(TARGET, report=report)
        result = run(engine, k, progress=report)
    return finish(result, as_json)


@app.command()
def prove(
    engine: Annotated[str, typer.Option(metavar="E", help="The engine to run.")],
    target: Annotated[str, typer.Option(metavar="T", help="Folder of the target, or its embedded name.")],
    draft: Annotated[str, typer.Option(metavar="D", help="Folder of the drafter, or its embedded name.")],
    k: K = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSONL or text file, or an embedded set: demo, prove.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to generate per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(metavar="X", help="Above 0 the distributions are tested.")] = 0.0,
    concurrency: Annotated[int, typer.Option(metavar="C", help="Largest batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of weights and activations in both engines.")] = "float32",
    drafter_independence: Annotated[
        bool, typer.Option("--drafter-independence", help="Compare with a drafter of shuffled weights, too.")
    ] = False,
    samples: Annotated[int, typer.Option(metavar="N", help="Per prompt and arm when sampling.")] = 500,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate on after the end of text.")] = False,
    seed: Annotated[int, typer.Option(help="Of the engines.")] = 0,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Run a real engine without and with speculation on the same prompts, and judge whether anything changed."""
    extra = _parse_settings(settings or [])
    from dflash_plugins.driver import find_driver
    from dflash_plugins.pairs import resolve
    from dflash_plugins.prove import run

    with quiet_stdout(), _progress() as report:
        driver = find_driver(engine)
        result = run(
            engine,
            resolve(target, report=report),
            resolve(draft, report=report),
            k=k,
            prompts=prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            concurrency=concurrency,
            dtype=dtype,
            drafter_independence=drafter_independence,
            samples=samples,
            ignore_eos=ignore_eos,
            seed=seed,
            extra=extra,
            progress=report,
            driver=driver,
        )
    return finish(result, as_json)


@app.command()
def bench(
    engine: Annotated[str, typer.Option(metavar="E", help="The engine to run.")],
    target: Annotated[str, typer.Option(metavar="T", help="Folder of the target, or its embedded name.")],
    draft: Annotated[str, typer.Option(metavar="D", help="Folder of the drafter, or its embedded name.")],
    k: Annotated[
        str, typer.Option("--k", metavar="N[,N...]", help="Proposals per round, several to find the best.")
    ] = "",
    concurrency: Annotated[str, typer.Option(metavar="C[,C...]", help="Requests at once.")] = "1,2,4,8",
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSONL or text file, or an embedded set: demo, prove.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to generate per prompt.")] = 128,
    runs: Annotated[int, typer.Option(metavar="N", help="Measured runs, of which medians are taken.")] = 5,
    dtype: Annotated[str, typer.Option(help="Of weights and activations in both engines.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Of the engines.")] = 0,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Measure a real engine without and with speculation, in turns, at several loads: speed-up, break-even, best K."""
    extra = _parse_settings(settings or [])
    ks, loads = _numbers("--k", k), _numbers("--concurrency", concurrency)
    from dflash_plugins.bench import run
    from dflash_plugins.driver import find_driver
    from dflash_plugins.pairs import resolve

    with quiet_stdout(), _progress() as report:
        driver = find_driver(engine)
        result = run(
            engine,
            resolve(target, report=report),
            resolve(draft, report=report),
            ks=ks,
            concurrency=loads,
            prompts=prompts,
            max_tokens=max_tokens,
            runs=runs,
            dtype=dtype,
            seed=seed,
            extra=extra,
            progress=report,
            driver=driver,
        )
    return finish(result, as_json)


@app.command("report")
def report_page(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.json ...", help="What bench --json printed.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="A page for people, with the plots in it.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The plots alone.")] = None,
    as_json: AsJson = False,
) -> int:
    """Plot results of bench: speed-up over load, acceptance by slot, the time of a round. Default: to report.html."""
    _require("bench", "matplotlib")
    from dflash_plugins.page import write

    page = Path("report.html") if html is None and png is None else html
    with quiet_stdout():
        written = write(runs, page, png)
    return finish(written, as_json)


@app.command()
def check(
    engine: Annotated[str, typer.Option(metavar="E", help="The engine it is planned for: vllm or sglang.")],
    target: Annotated[
        str,
        typer.Option(metavar="T", help="Folder of the target, its embedded name, or ORG/NAME[@REVISION] of the hub."),
    ],
    draft: Annotated[
        str,
        typer.Option(metavar="D", help="Folder of the drafter, its embedded name, or ORG/NAME[@REVISION] of the hub."),
    ],
    engine_version: Annotated[
        str | None, typer.Option(metavar="V", help="Instead of the engine that is installed here, if one is.")
    ] = None,
    k: K = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Say everything that is wrong with a pair and its planned launch. No engine has to be installed.

    --set takes the engine's own flags, for vLLM runner=v1|v2 and device=..., and memory_gib= and free_gib= of one GPU.
    """
    from dflash_plugins.hub import locate
    from dflash_plugins.serve import check as examine

    planned = _parse_settings(settings or [])
    with quiet_stdout(), _progress() as report:
        pair = locate(target, report=report), locate(draft, report=report)
        found = examine(engine, *pair, k=k, version=engine_version, settings=planned)
    return finish(found, as_json)


@app.command()
def serve(
    engine: Annotated[str, typer.Option(metavar="E", help="The engine that serves.")],
    target: Annotated[str, typer.Option(metavar="T", help="Folder of the target, or its embedded name.")],
    draft: Annotated[str, typer.Option(metavar="D", help="Folder of the drafter, or its embedded name.")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, metavar="P", help="Where it listens.")] = None,
    k: K = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Stay beside the server, and warn where what it drafts is not accepted.")
    ] = False,
    as_json: AsJson = False,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- ENGINE FLAGS", help="Go to the engine's server as they are.")
    ] = None,
) -> int:
    """Check a pair, and become the engine's own server on it; errors that were found are all said instead.

    With --json the document is printed before the server starts, whose own output then goes to stderr.
    """
    from dflash_plugins.driver import find_driver
    from dflash_plugins.pairs import resolve
    from dflash_plugins.serve import plan, replace_process, stay_beside

    if probe:
        _require("bench", "prometheus_client", "requests")
    with quiet_stdout(), _progress() as report:
        find_driver(engine)
        folder, drafter = resolve(target, report=report), resolve(draft, report=report)
        name = None if Path(target).expanduser().is_dir() else target
        found = plan(engine, folder, drafter, k=k, port=port, name=name, flags=flags or ())
    code = finish(found, as_json, stderr=True)
    if as_json:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if code != DONE:
        return code
    if probe:
        return stay_beside(found)
    replace_process(found.launch)
    return code


class _Report(Protocol):
    """What a command on top of an engine answers with."""

    @property
    def exit_code(self) -> int: ...
    def render(self, console: Console) -> None: ...
    def model_dump_json(self, *, indent: int) -> str: ...


def finish(report: _Report, as_json: bool, *, stderr: bool = False) -> int:
    """Shows a report on stdout; exit 1 where its answer is bad. ``stderr``: what is for people goes there."""
    from rich.console import Console

    if as_json:
        print(report.model_dump_json(indent=1), flush=True)
    else:
        report.render(Console(stderr=stderr))
    return report.exit_code


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="DRAFT", help="Folder of the drafter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder.")],
    to: Annotated[str, typer.Option(metavar="LAYOUT", help="released or speculators.")],
    as_json: AsJson = False,
) -> int:
    """Write a drafter in the other published layout, and say what became of every key, tensor and file."""
    from dflash_plugins.convert import convert as write

    return finish(write(source, out, to), as_json)


@app.command()
def train(
    target: Annotated[str, typer.Option(metavar="T", help="Folder of the target, or its embedded name.")],
    data: Annotated[
        list[Path],
        typer.Option(metavar="DATA", help="Folders of features of the target's answers, or a file of answers."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the drafter goes, and the state of the run.")],
    method: Annotated[str, typer.Option(help="dflash, dflash2 or dloop (mode refine).")] = "dflash",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps in all, over all legs.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="End this leg after so long; run again to go on.")
    ] = None,
    divide: Annotated[
        bool, typer.Option("--divide", help="Divide the drafter between the processes of torchrun (FSDP2).")
    ] = False,
    held_out_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between looks at a few held-out answers.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Train a drafter, in legs that go on where the last one ended, and export it in the layout that engines load."""
    _require("train", "accelerate", "torch", "transformers")
    from dflash_plugins.pairs import resolve

    recipe = _parse_settings(settings or [])
    with quiet_stdout(), _progress() as report:
        folder = resolve(target, report=report)
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is loaded; see docs/training.md
        from dflash_plugins.train.run import run  # loads torch: after everything that can be refused at once

        result = run(
            method=method,
            target=folder,
            data=data,
            out=out,
            steps=steps,
            minutes=minutes,
            settings=recipe,
            divided=divide,
            held_out_every=held_out_every,
            report=report,
        )
    if result is None:
        return DONE  # one of several processes, of which the first reports
    if as_json:
        _print_json(result.model_dump(mode="json"))
    else:
        _print_training(result)
    return DONE


def _print_training(result: TrainReport) -> None:
    state = "finished" if result.finished else "this leg has ended; the same command goes on"
    slots = " ".join(f"{rate:.3f}" for rate in result.accepted_by_slot)
    print(f"{result.path}: step {result.step} of {result.steps}, {state}")
    if result.taken_from_start:
        print(f"first weights: {len(result.taken_from_start)} tensors of the drafter it started from")
    print(f"held out: {result.emitted_per_round:.3f} emitted per round; accepted by slot {slots}")


def _require(extra: str, *modules: str) -> None:
    """Says which extra to install instead of failing at an import."""
    from dflash_plugins.errors import BadInput

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise BadInput(f"{' and '.join(missing)} missing here: install dflash-plugins[{extra}]")


def _parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs with values as YAML scalars; all that are not pairs, and keys given twice, at once."""
    from dflash_plugins.errors import BadInput
    from dflash_plugins.settings import flag_value

    parsed: dict[str, Any] = {}
    faults = []
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not (key and separator) or key in parsed:
            faults.append(setting)
        parsed[key] = flag_value(value)
    if faults:
        raise BadInput(f"--set takes KEY=VALUE, each key once; not so: {', '.join(faults)}")
    return parsed


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers; none of an empty text."""
    from dflash_plugins.errors import BadInput

    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise BadInput(f"{option} {text}: expected numbers with commas between them")
    return tuple(map(int, parts))


if __name__ == "__main__":
    sys.exit(main())
