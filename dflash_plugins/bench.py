"""``bench``: how much faster is a real engine with speculation, at which load, and with how many proposals?

The plain engine and one engine per K are alive together and take turns on the same waves of prompts, so that whatever
slows the machine down slows all of them. A wave is as many prompts as the concurrency, started at once; a run is all
waves. The order of turns is another in every wave. Requests of a wave end at different times where more or less is
accepted, and nothing is put in their place: at high concurrency this is unkind to speculation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_plugins.bench_report import BenchReport, BenchRow, break_even, pays_best
from dflash_plugins.bench_rows import row
from dflash_plugins.driver import (
    Counters,
    EngineConfig,
    EngineDriver,
    EngineSession,
    Generated,
    Progress,
    Sampling,
    encode_prompts,
    find_driver,
    require_comparable,
)
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding
from dflash_plugins.pairs import load_prompts
from dflash_plugins.prove import check_inputs

CONCURRENCY = (1, 2, 4, 8)
RUNS = 5
MAX_TOKENS = 128


@dataclass
class Lane:
    """What one engine did at one concurrency: its answers, wave by wave, of every run."""

    runs: list[list[Generated]] = field(default_factory=list)

    @property
    def waves(self) -> list[Generated]:
        """Of all runs."""
        return [wave for run in self.runs for wave in run]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every run."""
        return [sum(w.tokens for w in run) / sum(w.seconds for w in run) for run in self.runs]

    @property
    def counters(self) -> Counters:
        """Sums over all runs."""
        return sum((wave.counters for wave in self.waves), Counters())


def run(
    engine: str,
    target: str | Path,
    draft: str | Path,
    *,
    ks: Sequence[int] = (),
    concurrency: Sequence[int] = CONCURRENCY,
    prompts: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    runs: int = RUNS,
    dtype: str = "bfloat16",
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    driver: EngineDriver | None = None,
) -> BenchReport:
    """Measure plain decoding against every K of ``ks`` (none: the trained block's), greedy, end of text ignored.

    ``prompts`` is a file or an embedded set (default: the demo's); ``extra`` holds arguments under the engine's own
    names. Raises BadInput (engines that differ in more than speculation, no round drafted), Refused, EngineMissing or
    EngineError.
    """
    _require_arguments(ks, concurrency, max_tokens, runs)
    report = progress or (lambda stage, done, total: None)
    chosen = load_prompts(prompts if prompts is not None else "demo")
    configs, findings = _configs(engine, target, draft, ks, extra or {}, dtype, max(concurrency), seed)
    driver = driver or find_driver(engine)
    with contextlib.ExitStack() as stack:
        sessions = _start(stack, driver, configs, report)
        ids = encode_prompts(sessions[0], chosen, max_tokens)
        how = Sampling(max_tokens=max_tokens, ignore_eos=True, times=True)
        lanes = _measure(sessions, ids, how, concurrency, runs, report)
        hello = sessions[0].hello
    served = [config.k for config in configs[1:] if config.k is not None]
    rows = [_row(c, k, lanes[c], n) for n, k in enumerate(served, 1) for c in concurrency]
    return BenchReport(
        engine=hello.engine,
        engine_version=hello.version,
        target=Path(configs[0].target).name,
        draft=Path(str(draft)).name,
        dtype=dtype,
        prompts=len(chosen),
        max_tokens=max_tokens,
        runs=runs,
        flags=hello.flags,
        rows=tuple(rows),
        break_even_concurrency=break_even(rows, pays_best(rows)),
        break_even_by_k={k: break_even(rows, k) for k in served},
        best_k=pays_best(rows) if len(served) > 1 else None,
        findings=findings,
    )


def _row(concurrency: int, k: int, lanes: Sequence[Lane], number: int) -> BenchRow:
    plain, spec = lanes[0], lanes[number]
    if spec.counters.rounds == 0:
        raise BadInput(f"the engine with K = {k} ran no speculative round: there is nothing to measure")
    return row(concurrency, k, plain.runs, spec.runs)


def _require_arguments(ks: Sequence[int], concurrency: Sequence[int], max_tokens: int, runs: int) -> None:
    faults = []
    for name, values in (("k", ks), ("concurrency", concurrency), ("max_tokens", (max_tokens,)), ("runs", (runs,))):
        if any(value < 1 for value in values) or len(set(values)) < len(values):
            faults.append(f"{name} {', '.join(map(str, values))}: numbers from 1 on, each once")
    if not concurrency:
        faults.append("no concurrency to measure at")
    if faults:
        raise BadInput("; ".join(faults))


def _configs(
    engine: str,
    target: str | Path,
    draft: str | Path,
    ks: Sequence[int],
    extra: Mapping[str, Any],
    dtype: str,
    largest: int,
    seed: int,
) -> tuple[list[EngineConfig], tuple[Finding, ...]]:
    """The plain engine, then one per K; warnings about any of them."""
    found: dict[str, Finding] = {}
    drafting = []
    share = 1 / (1 + max(1, len(ks)))
    for k in ks or (None,):
        pair, warnings = check_inputs(engine, target, draft, k, extra)
        found |= {str(warning): warning for warning in warnings}
        config = EngineConfig(**pair, dtype=dtype, max_num_seqs=largest, seed=seed, memory_share=share, extra=extra)
        drafting.append(config)
    return [drafting[0].plain(), *drafting], tuple(found.values())


def _start(
    stack: contextlib.ExitStack, driver: EngineDriver, configs: Sequence[EngineConfig], progress: Progress
) -> list[EngineSession]:
    sessions: list[EngineSession] = []
    for number, config in enumerate(configs):
        progress("starting engines", number, len(configs))
        sessions.append(stack.enter_context(driver.start(config)))
        require_comparable(sessions[0].hello, sessions[-1].hello)
    progress("starting engines", len(configs), len(configs))
    return sessions


def _measure(
    sessions: Sequence[EngineSession],
    ids: Sequence[Sequence[int]],
    how: Sampling,
    concurrency: Sequence[int],
    runs: int,
    progress: Progress,
) -> dict[int, list[Lane]]:
    """By concurrency a lane per engine; one unmeasured run of each first, which fills caches."""
    lanes = {c: [Lane() for _ in sessions] for c in concurrency}
    total = (runs + 1) * len(sessions) * sum(len(waves_of(ids, c)) for c in concurrency)
    done = 0
    for turn in range(runs + 1):
        for c, lane in lanes.items():
            answers: list[list[Generated]] = [[] for _ in sessions]
            for number, wave in enumerate(waves_of(ids, c)):
                for place in range(len(sessions)):
                    who = (place + number + turn) % len(sessions)
                    answers[who].append(sessions[who].generate(wave, how))
                    done += 1
                    progress(f"measuring: {c} at once" if turn else "warming up", done, total)
            if turn:
                for one, found in zip(lane, answers, strict=True):
                    one.runs.append(found)
    return lanes


def waves_of(ids: Sequence[Sequence[int]], concurrency: int) -> list[list[Sequence[int]]]:
    """All prompts in waves of exactly ``concurrency``; the last is filled up from the first prompts."""
    waves = range(0, len(ids), concurrency)
    return [[ids[(start + i) % len(ids)] for i in range(concurrency)] for start in waves]
