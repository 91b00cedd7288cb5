"""What ``bench`` answers: rows by load and K, as data, for people, and for a row of the compatibility matrix."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from dflash_plugins.findings import Finding

if TYPE_CHECKING:
    from rich.console import Console


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Percentiles(_Frozen):
    """Of all requests or tokens, in milliseconds."""

    p50: float
    p90: float
    p99: float


class Latency(_Frozen):
    """Time to first token, and time per token after it; tokens of one round share its time equally."""

    ttft_ms: Percentiles
    inter_token_ms: Percentiles


class CycleTimes(_Frozen):
    """Times of methods.md section 7: T_AR, T_round = T_d + T_v + T_o, and its parts where they could be measured.

    ``timed_by`` steps: medians over steps of decoding. By wall: all of the time, prompts included, over what was made.
    """

    ar_ms: float
    round_ms: float
    timed_by: Literal["steps", "wall"]
    draft_ms: float | None = None
    verify_ms: float | None = None
    overhead_ms: float | None = None
    not_split_because: str | None = None


class BenchRow(_Frozen):
    """One load and one K. Rates and ``speedup`` are medians over the runs, ``speedup_ci95`` of waves drawn again.

    ``predicted_speedup`` is T_AR * emitted / T_round: what decoding alone would come to. Latencies are None where the
    engine's driver does not say when tokens came.
    """

    concurrency: int
    k: int
    plain_tps: float
    spec_tps: float
    speedup: float
    speedup_ci95: tuple[float, float] | None
    predicted_speedup: float
    emitted_per_round: float
    accepted_by_slot: tuple[float, ...]
    cycle: CycleTimes
    plain_latency: Latency | None
    spec_latency: Latency | None
    plain_runs_tps: tuple[float, ...]
    spec_runs_tps: tuple[float, ...]


class BenchReport(_Frozen):
    """Outcome. ``best_k`` is None where one K was measured; ``break_even_concurrency`` is that of the best K.

    A break-even is None where the speed-up crosses 1 nowhere between the loads that were measured.
    """

    engine: str
    engine_version: str
    target: str
    draft: str
    dtype: str
    prompts: int
    max_tokens: int
    runs: int
    flags: Mapping[str, Any]
    rows: tuple[BenchRow, ...]
    break_even_concurrency: float | None
    break_even_by_k: Mapping[int, float | None]
    best_k: int | None
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0: a drafter that does not pay is an answer, not an error."""
        return 0

    def speedup_by_concurrency(self, k: int | None = None) -> dict[int, float]:
        """For a row of the compatibility matrix; ``k`` defaults to the best, or the only one."""
        k = pays_best(self.rows) if k is None else k
        return {row.concurrency: row.speedup for row in self.rows if row.k == k}

    def render(self, console: Console) -> None:
        """Write the report for people."""
        from rich.table import Table

        said = f"{self.target}, {self.draft}, {self.engine} {self.engine_version}, {self.dtype}, greedy"
        table = Table(
            *("K", "at once", "plain tokens/s", "with drafts", "speed-up", "95 % interval", "predicted"),
            *("emitted per round", "ms per token plain", "ms per round"),
            title=f"{said}: {self.prompts} prompts, {self.max_tokens} tokens, median of {self.runs} runs",
        )
        for row in self.rows:
            interval = "" if row.speedup_ci95 is None else "{:.2f} to {:.2f}".format(*row.speedup_ci95)
            table.add_row(
                *(str(row.k), str(row.concurrency), f"{row.plain_tps:.1f}", f"{row.spec_tps:.1f}"),
                *(f"{row.speedup:.2f} x", interval, f"{row.predicted_speedup:.2f} x", f"{row.emitted_per_round:.2f}"),
                *(f"{row.cycle.ar_ms:.1f}", f"{row.cycle.round_ms:.1f}"),
            )
        console.print(table)
        for k, found in self.break_even_by_k.items():
            console.print(f"K {k}: {break_even_words(self.rows, k, found)}")
        if self.best_k is not None:
            console.print(f"best K over these loads: {self.best_k}")


def pays_best(rows: Sequence[BenchRow]) -> int:
    """K with the largest geometric mean of the speed-ups, the smallest such K."""
    return max(
        sorted({row.k for row in rows}), key=lambda k: statistics.fmean(math.log(r.speedup) for r in rows if r.k == k)
    )


def break_even(rows: Sequence[BenchRow], k: int) -> float | None:
    """Requests at once at which the speed-up of ``k`` falls to 1, between two loads on a scale of logarithms."""
    points = sorted((row.concurrency, row.speedup) for row in rows if row.k == k)
    for (low, above), (high, below) in pairwise(points):
        if above >= 1 > below:
            share = (above - 1) / (above - below)
            return float(low * (high / low) ** share)
    return None


def break_even_words(rows: Sequence[BenchRow], k: int, found: float | None) -> str:
    """The same as a sentence."""
    points = sorted((row.concurrency, row.speedup) for row in rows if row.k == k)
    if found is not None:
        return f"break-even at {found:.1f} requests at once"
    if points[0][1] < 1:
        return f"does not pay at {points[0][0]} at once" + (
            "" if all(speedup < 1 for _, speedup in points) else ", yet does at more"
        )
    return f"pays at every measured load, up to {points[-1][0]} at once"
