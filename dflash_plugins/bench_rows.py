"""Arithmetic of ``bench``: what the answers of a plain and of a speculative engine at one load come to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from dflash_plugins.bench_report import BenchRow, CycleTimes, Latency, Percentiles
from dflash_plugins.cycle import cycle_speedup
from dflash_plugins.driver import Completion, Counters, Generated
from dflash_plugins.statistics import bootstrap_ratio

Runs = Sequence[Sequence[Generated]]
"""Waves of every run."""

NOT_SPLIT = "a round is seen from outside here: its parts are timed on vLLM only, on a CPU and the V1 runner"


def row(concurrency: int, k: int, plain: Runs, spec: Runs) -> BenchRow:
    """One row; the runs of both are paired, and so are their waves."""
    rates = [[_rate(run) for run in runs] for runs in (plain, spec)]
    counters = sum((wave.counters for run in spec for wave in run), Counters())
    cycle = _cycle(concurrency, plain, spec, counters)
    predicted = cycle_speedup(cycle.ar_ms, 0.0, cycle.round_ms, 0.0, counters.emitted_per_round)
    return BenchRow(
        concurrency=concurrency,
        k=k,
        plain_tps=statistics.median(rates[0]),
        spec_tps=statistics.median(rates[1]),
        speedup=statistics.median(b / a for a, b in zip(*rates, strict=True)),
        speedup_ci95=_interval(plain, spec),
        predicted_speedup=predicted,
        emitted_per_round=counters.emitted_per_round,
        accepted_by_slot=counters.rates_by_slot,
        cycle=cycle,
        plain_latency=latency(plain),
        spec_latency=latency(spec),
        plain_runs_tps=tuple(rates[0]),
        spec_runs_tps=tuple(rates[1]),
    )


def _rate(run: Sequence[Generated]) -> float:
    return sum(wave.tokens for wave in run) / sum(wave.seconds for wave in run)


def _interval(plain: Runs, spec: Runs) -> tuple[float, float] | None:
    """95 %, of waves drawn again; None with a single wave, which says nothing about its like."""
    first, second = ([wave for run in runs for wave in run] for runs in (spec, plain))
    if len(first) < 2:
        return None
    parts = [[float(wave.tokens) for wave in waves] for waves in (first, second)]
    wholes = [[wave.seconds for wave in waves] for waves in (first, second)]
    ratio = bootstrap_ratio(parts[0], wholes[0], parts[1], wholes[1])
    return ratio.low, ratio.high


def _cycle(concurrency: int, plain: Runs, spec: Runs, counters: Counters) -> CycleTimes:
    """A step's time where the driver gives arrivals, else wall time over what was made in it, prompts included."""
    steps = [[gap for one in _completions(runs) for gap, _ in gaps(one)] for runs in (plain, spec)]
    if all(steps):
        ar, whole = (1000 * statistics.median(found) for found in steps)
    else:
        seconds = [sum(wave.seconds for run in runs for wave in run) for runs in (plain, spec)]
        tokens = sum(wave.tokens for run in plain for wave in run)
        ar, whole = (1000 * concurrency * s / n for s, n in zip(seconds, (tokens, counters.rounds), strict=True))
    parts = [part for run in spec for wave in run for part in wave.parts or ()]
    known = _parts(parts, whole) if all(steps) and parts else {"not_split_because": NOT_SPLIT}
    return CycleTimes(ar_ms=ar, round_ms=whole, timed_by="steps" if all(steps) else "wall", **known)


def _parts(parts: Sequence[tuple[float, float]], whole_ms: float) -> dict[str, Any]:
    """T_d, T_v and what is left of a round."""
    draft, verify = (1000 * statistics.median(seconds) for seconds in zip(*parts, strict=True))
    return {"draft_ms": draft, "verify_ms": verify, "overhead_ms": max(0.0, whole_ms - draft - verify)}


def _completions(runs: Runs) -> Iterator[Completion]:
    return (one for run in runs for wave in run for one in wave.completions)


def gaps(completion: Completion) -> Iterator[tuple[float, int]]:
    """(seconds since the tokens before, how many tokens came) of every step after the first token's."""
    arrivals = completion.arrivals or ()
    yield from zip((b - a for a, b in pairwise(arrivals)), completion.emitted or (), strict=True)


def latency(runs: Runs) -> Latency | None:
    """None where the driver does not say when tokens came. Tokens of one step share its time equally."""
    first = [1000 * one.arrivals[0] for one in _completions(runs) if one.arrivals]
    each = [1000 * gap / n for one in _completions(runs) for gap, n in gaps(one) for _ in range(n)]
    if not first or not each:
        return None
    return Latency(ttft_ms=percentiles(first), inter_token_ms=percentiles(each))


def percentiles(values: Sequence[float]) -> Percentiles:
    """Of at least one value: the least that so many of a hundred do not exceed."""
    ordered = sorted(values)
    found = {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 90, 99)}
    return Percentiles(**found)
