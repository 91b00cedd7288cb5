"""``demo``: the embedded target answers fixed prompts, plainly and with every drafter trained for it, side by side.

All engines are started first and then take turns on one prompt after another, so that whatever slows the machine down
slows all of them. A measurement is one alternation: every method over all prompts. Ratios are taken within an
alternation.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from dflash_plugins.driver import (
    Completion,
    Counters,
    EngineConfig,
    EngineDriver,
    EngineSession,
    Progress,
    Sampling,
    encode_prompts,
    find_driver,
    require_comparable,
)
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding
from dflash_plugins.identity import Difference, differences
from dflash_plugins.pairs import DRAFTERS, load_prompts
from dflash_plugins.pairs.prompts import Prompt
from dflash_plugins.prove import check_inputs
from dflash_plugins.statistics import ratio_interval

TARGET = "smollm2-135m"
DTYPE = "bfloat16"
TOKENS = 128
ALTERNATIONS = 5
# Four rows are verified for the price of one on a CPU; the last slots of a whole block of eight are hardly ever
# accepted.
SERVED_K = {"dflash": 3, "dflash2": 3, "dloop": 3}
TEXT_COLUMNS = 300


class DemoRun(BaseModel):
    """One method over all prompts. ``speedup`` is the median over the alternations, 1.0 for plain decoding itself."""

    model_config = ConfigDict(frozen=True)

    method: str
    mode: str | None
    k: int | None
    lossless: bool
    differences: tuple[Difference, ...]
    emitted_per_round: float
    emitted_per_round_by_set: Mapping[str, float]
    accepted_by_slot: tuple[float, ...]
    tokens_per_s: float
    speedup: float
    speedup_ci95: tuple[float, float]


class DemoText(BaseModel):
    """What the target answered plainly, and the methods whose answer is the same to the last token."""

    model_config = ConfigDict(frozen=True)

    id: str
    set: str
    prompt: str | None
    text: str | None
    same: tuple[str, ...]


class DemoReport(BaseModel):
    """Outcome. ``runs[0]`` is plain decoding."""

    model_config = ConfigDict(frozen=True)

    engine: str
    engine_version: str
    target: str
    dtype: str
    tokens: int
    alternations: int
    flags: Mapping[str, Any]
    runs: tuple[DemoRun, ...]
    texts: tuple[DemoText, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 when every method kept the text, else 1."""
        return 0 if all(run.lossless for run in self.runs) else 1

    def render(self, console: Console) -> None:
        """Write the report for people."""
        _render(self, console)


@dataclass(frozen=True)
class Contestant:
    """A way of decoding that takes part: plain when its configuration has no drafter."""

    method: str
    mode: str | None
    config: EngineConfig

    @property
    def name(self) -> str:
        """Method and, where there are several readings of it, mode."""
        return f"{self.method} ({self.mode})" if self.mode else self.method


@dataclass
class Track:
    """What one contestant did: per alternation its seconds and completions, per prompt its counters."""

    seconds: list[float] = field(default_factory=list)
    completions: list[list[Completion]] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Tokens generated in each alternation."""
        return [sum(len(c.ids) for c in alternation) for alternation in self.completions]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each alternation."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def run(
    engine: str = "vllm",
    k: int | None = None,
    *,
    progress: Progress | None = None,
    driver: EngineDriver | None = None,
    contestants: Sequence[Contestant] | None = None,
    prompts: Sequence[Prompt] | None = None,
    tokens: int = TOKENS,
    alternations: int = ALTERNATIONS,
) -> DemoReport:
    """Run the demonstration. ``k`` counts proposals (default: what pays best per method on a CPU).

    Raises BadInput, Refused, EngineMissing or EngineFailed; engines that differ in more than speculation are refused.
    """
    progress = progress or (lambda stage, done, total: None)
    driver = driver or find_driver(engine)
    findings: tuple[Finding, ...] = ()
    if contestants is None:
        contestants, findings = embedded_contestants(engine, k)
    prompts = load_prompts("demo") if prompts is None else prompts
    with contextlib.ExitStack() as stack:
        sessions = []
        for number, contestant in enumerate(contestants):
            progress("starting engines", number, len(contestants))
            sessions.append(stack.enter_context(driver.start(contestant.config)))
            require_comparable(sessions[0].hello, sessions[-1].hello)
        progress("starting engines", len(contestants), len(contestants))
        ids = encode_prompts(sessions[0], prompts, tokens)
        tracks = alternate(sessions, ids, Sampling(max_tokens=tokens, ignore_eos=True), alternations, progress)
        runs = tuple(
            _run(sessions[0], contestant, prompts, ids, tracks[0], track)
            for contestant, track in zip(contestants, tracks, strict=True)
        )
        hello = sessions[0].hello
    return DemoReport(
        engine=hello.engine,
        engine_version=hello.version,
        target=Path(contestants[0].config.target).name,
        dtype=contestants[0].config.dtype,
        tokens=tokens,
        alternations=alternations,
        flags=hello.flags,
        runs=runs,
        texts=_texts(prompts, contestants, tracks),
        findings=findings,
    )


def embedded_contestants(engine: str, k: int | None) -> tuple[tuple[Contestant, ...], tuple[Finding, ...]]:
    """Plain decoding and every drafter of the embedded target; raises BadInput when one is not installed."""
    drafted: list[Contestant] = []
    findings: list[Finding] = []
    drafters = [one for one in DRAFTERS.values() if one.target == TARGET and one.superseded_by is None]
    for drafter in drafters:
        pair, found = check_inputs(engine, TARGET, drafter.name, k or SERVED_K[drafter.method], {})
        findings += found
        config = EngineConfig(**pair, dtype=DTYPE, memory_share=1 / (len(drafters) + 1))
        drafted.append(Contestant(drafter.method, _mode(pair["draft"]), config))
    if not drafted:
        raise BadInput(f"no drafter for {TARGET} is in the catalogue")
    return (Contestant("plain", None, drafted[0].config.plain()), *drafted), tuple(findings)


def _mode(draft: str) -> str | None:
    from dflash_plugins.config import read_draft_config

    loop = read_draft_config(draft).require().loop
    return loop.mode if loop else None


def alternate(
    sessions: Sequence[EngineSession],
    ids: Sequence[Sequence[int]],
    how: Sampling,
    alternations: int,
    progress: Progress,
) -> list[Track]:
    """One unmeasured alternation that fills caches, then the measured ones; batch 1, each session first in turn."""
    tracks = [Track() for _ in sessions]
    total = (alternations + 1) * len(sessions) * len(ids)
    done = 0
    for alternation in range(alternations + 1):
        if alternation:
            for track in tracks:
                track.seconds.append(0.0)
                track.completions.append([])
        for prompt, row in enumerate(ids):
            for turn in range(len(sessions)):
                who = (turn + prompt + alternation) % len(sessions)
                generated = sessions[who].generate([row], how)
                if alternation:
                    tracks[who].seconds[-1] += generated.seconds
                    tracks[who].completions[-1].append(generated.completions[0])
                    _count(tracks[who], prompt, generated.counters)
                done += 1
                progress("decoding" if alternation else "warming up", done, total)
    return tracks


def _count(track: Track, prompt: int, counters: Counters) -> None:
    track.counters += [Counters()] * (prompt + 1 - len(track.counters))
    track.counters[prompt] += counters


def _run(
    judge: EngineSession,
    contestant: Contestant,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    plain: Track,
    track: Track,
) -> DemoRun:
    found = _all_differences(judge, prompts, ids, plain, track, contestant.config.dtype)
    total = sum(track.counters, Counters())
    if contestant.config.draft is None:
        speedup, interval = 1.0, (1.0, 1.0)
    else:
        ratio = ratio_interval(track.rates, plain.rates)
        speedup, interval = ratio.median, (ratio.low, ratio.high)
    return DemoRun(
        method=contestant.method,
        mode=contestant.mode,
        k=contestant.config.k,
        lossless=all(difference.verdict != "FAIL" for difference in found),
        differences=found,
        emitted_per_round=total.emitted_per_round,
        emitted_per_round_by_set=_by_set(prompts, track.counters),
        accepted_by_slot=total.rates_by_slot,
        tokens_per_s=statistics.median(track.rates),
        speedup=speedup,
        speedup_ci95=interval,
    )


def _all_differences(
    judge: EngineSession,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    plain: Track,
    track: Track,
    dtype: str,
) -> tuple[Difference, ...]:
    """First differences of every alternation; the same one seen several times is listed once."""
    names = [prompt.id for prompt in prompts]
    found: dict[Difference, None] = {}
    for first, second in zip(plain.completions, track.completions, strict=True):
        found |= dict.fromkeys(differences(judge, names, ids, first, second, dtype))
    return tuple(found)


def _by_set(prompts: Sequence[Prompt], counters: Sequence[Counters]) -> dict[str, float]:
    sums: dict[str, Counters] = {}
    for prompt, counted in zip(prompts, counters, strict=True):
        sums[prompt.set] = sums.get(prompt.set, Counters()) + counted
    return {name: total.emitted_per_round for name, total in sums.items()}


def _texts(
    prompts: Sequence[Prompt], contestants: Sequence[Contestant], tracks: Sequence[Track]
) -> tuple[DemoText, ...]:
    last = [track.completions[-1] for track in tracks]
    return tuple(
        DemoText(
            id=prompt.id,
            set=prompt.set,
            prompt=prompt.prompt,
            text=last[0][number].text,
            same=tuple(
                contestant.name
                for contestant, completions in zip(contestants[1:], last[1:], strict=True)
                if completions[number].ids == last[0][number].ids
            ),
        )
        for number, prompt in enumerate(prompts)
    )


def _render(report: DemoReport, console: Console) -> None:
    _render_texts(report, console)
    table = Table(
        "method",
        "K",
        "same text",
        "emitted per round",
        "tokens/s",
        "speed-up",
        "95 % interval",
        title=f"{report.target}, {report.engine} {report.engine_version}, {report.dtype}, batch 1, "
        f"{report.tokens} tokens, {report.alternations} alternations",
    )
    for one in report.runs:
        by_set = ", ".join(f"{name} {value:.2f}" for name, value in one.emitted_per_round_by_set.items())
        table.add_row(
            f"{one.method} ({one.mode})" if one.mode else one.method,
            "" if one.k is None else str(one.k),
            _verdict(one),
            f"{one.emitted_per_round:.2f} ({by_set})" if one.k else "1",
            f"{one.tokens_per_s:.1f}",
            f"{one.speedup:.2f} x",
            f"{one.speedup_ci95[0]:.2f} to {one.speedup_ci95[1]:.2f}" if one.k else "",
        )
    console.print(table)
    console.print("[bold red]FAIL: not lossless[/]" if report.exit_code else "[bold green]no FAIL[/]")


def _verdict(one: DemoRun) -> str:
    if not one.differences:
        return "yes"
    verdicts = [difference.verdict for difference in one.differences]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("tie", "numerical", "FAIL") if name in verdicts)
    return f"but for {counts}"


def _render_texts(report: DemoReport, console: Console) -> None:
    table = Table("prompt", "answer (its beginning)", "same to the last token", show_lines=True)
    for text in report.texts:
        beginning = (text.text or "")[:TEXT_COLUMNS]
        table.add_row(text.id, beginning, ", ".join(text.same) or "-")
    console.print(table)
