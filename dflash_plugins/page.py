"""``report``: results of ``bench`` as one page that needs nothing beside it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_plugins.bench_report import BenchReport, break_even_words
from dflash_plugins.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

STYLE = """body { font-family: sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; line-height: 1.45 }
table { border-collapse: collapse; margin: 1em 0 } td, th { border-bottom: 1px solid #ccc; padding: .3em .8em;
text-align: right } svg { width: 100%; height: auto } code { background: #f2f2f2 } .bad { color: #a00 }"""
HEADS = (
    *("K", "at once", "plain tokens/s", "with drafts", "speed-up", "95 %", "predicted", "emitted per round"),
    *("first token, ms (plain)", "per token, ms (plain)"),
)


class ReportFiles(BaseModel):
    """What was written, and of how many results."""

    model_config = ConfigDict(frozen=True)

    runs: int
    html: str | None
    png: str | None

    @property
    def exit_code(self) -> int:
        """0: it was written."""
        return 0

    def render(self, console: Console) -> None:
        """The files, one per line."""
        for path in filter(None, (self.html, self.png)):
            console.print(path, soft_wrap=True, highlight=False)


def read_runs(paths: Iterable[Path]) -> list[tuple[str, BenchReport]]:
    """Results by the names of their files; raises BadInput naming every file that is no result of ``bench``."""
    found, faults = [], []
    for path in paths:
        try:
            found.append((path.stem, BenchReport.model_validate_json(path.read_text(encoding="utf-8"))))
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
        except (UnicodeDecodeError, ValidationError):
            faults.append(f"{path}: is not what bench --json prints")
    if faults or not found:
        raise BadInput("; ".join(faults) or "no result to report")
    return found


def write(paths: Sequence[Path], page: Path | None, picture: Path | None) -> ReportFiles:
    """Read results and write what is asked for; raises BadInput where a file cannot be read or written."""
    from dflash_plugins import plots

    runs = read_runs(paths)
    try:
        if page is not None:
            page.write_text(document(runs, plots.svg(runs)), encoding="utf-8")
        if picture is not None:
            plots.png(runs, picture)
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from error
    names = [None if path is None else str(path) for path in (page, picture)]
    return ReportFiles(runs=len(runs), html=names[0], png=names[1])


def document(runs: Sequence[tuple[str, BenchReport]], plot: str) -> str:
    """The page; ``plot`` is an SVG element."""
    parts = "\n".join(_section(name, run) for name, run in runs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Speculative decoding, measured</title>\n'
        f"<style>{STYLE}</style></head><body>\n<h1>Speculative decoding, measured</h1>\n{plot}\n{parts}\n"
        "<h2>How to read it</h2>\n<p>Plain and speculative engine took turns on the same prompts, greedy, not stopping "
        "at the end of text. Speed-up is the median over the runs of one engine's tokens per second over the other's; "
        "the interval is that of waves of prompts drawn again. Predicted is T_AR * emitted / T_round: what decoding "
        "alone would gain, without the prompts. Emitted per round counts accepted proposals and the correction or "
        "bonus. Slots are counted over all rounds.</p>\n</body></html>\n"
    )


def _section(name: str, run: BenchReport) -> str:
    said = html.escape(f"{run.engine} {run.engine_version}, {run.target} with {run.draft}, {run.dtype}")
    sentences = [f"K {k}: {break_even_words(run.rows, k, found)}." for k, found in run.break_even_by_k.items()]
    if run.best_k is not None:
        sentences.append(f"Best K over these loads: {run.best_k}.")
    flags = ", ".join(f"{key} {value}" for key, value in run.flags.items())
    heads = "".join(f"<th>{head}</th>" for head in HEADS)
    found = "".join(f"<li>{html.escape(str(finding))}</li>" for finding in run.findings)
    warnings = f"<p class=bad>Warned of before:</p><ul>{found}</ul>" if found else ""
    return (
        f"<h2>{html.escape(name)}</h2>\n<p>{said}: {run.prompts} prompts, {run.max_tokens} tokens each, "
        f"{run.runs} runs.</p>\n<p>{' '.join(sentences)}</p>\n<table><tr>{heads}</tr>{_rows(run)}</table>\n"
        f"{warnings}<p>Flags of both: <code>{html.escape(flags)}</code></p>"
    )


def _rows(run: BenchReport) -> str:
    lines = []
    for row in run.rows:
        interval = "" if row.speedup_ci95 is None else "{:.2f} to {:.2f}".format(*row.speedup_ci95)
        first = each = "unknown"
        if row.spec_latency and row.plain_latency:
            first, each = (
                f"{getattr(row.spec_latency, key).p50:.1f} ({getattr(row.plain_latency, key).p50:.1f})"
                for key in ("ttft_ms", "inter_token_ms")
            )
        cells = (
            *(row.k, row.concurrency, f"{row.plain_tps:.1f}", f"{row.spec_tps:.1f}", f"{row.speedup:.2f}", interval),
            *(f"{row.predicted_speedup:.2f}", f"{row.emitted_per_round:.2f}", first, each),
        )
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "".join(lines)
