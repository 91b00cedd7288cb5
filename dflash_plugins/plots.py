"""Plots of ``bench`` results: speed-up over load, acceptance by slot, where the time of a round goes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_plugins.bench_report import BenchReport, BenchRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = tuple[str, BenchReport]
"""A name for people, and what was measured."""


def figure(runs: Sequence[Run]) -> Figure:
    """The three plots side by side. Needs matplotlib; nothing is shown and no global state is touched."""
    from matplotlib.figure import Figure

    whole = Figure(figsize=(16, 4.8), layout="constrained")
    first, second, third = whole.subplots(1, 3)
    _speedup(first, runs)
    _slots(second, runs)
    _cycle(third, runs)
    return whole


def png(runs: Sequence[Run], path: Path) -> None:
    """Write the plots as a picture."""
    figure(runs).savefig(path, format="png", dpi=130)


def svg(runs: Sequence[Run]) -> str:
    """The plots as one SVG element."""
    text = io.StringIO()
    figure(runs).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _lines(runs: Sequence[Run]) -> list[tuple[str, list[BenchRow]]]:
    """(label, rows by load) of every run and K."""
    found = []
    for name, run in runs:
        for k in sorted({row.k for row in run.rows}):
            rows = sorted((row for row in run.rows if row.k == k), key=lambda row: row.concurrency)
            found.append((f"{name}, K {k}" if len(runs) > 1 else f"K {k}", rows))
    return found


def _speedup(axes: Axes, runs: Sequence[Run]) -> None:
    for label, rows in _lines(runs):
        loads = [row.concurrency for row in rows]
        (line,) = axes.plot(loads, [row.speedup for row in rows], marker="o", label=label)
        axes.plot(loads, [row.predicted_speedup for row in rows], ls=":", color=line.get_color(), alpha=0.7)
        if all(row.speedup_ci95 for row in rows):
            low, high = zip(*(row.speedup_ci95 for row in rows if row.speedup_ci95), strict=True)
            axes.fill_between(loads, low, high, color=line.get_color(), alpha=0.15)
    axes.axhline(1, color="black", lw=0.8)
    loads = sorted({row.concurrency for _, run in runs for row in run.rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set(xlabel="requests at once", ylabel="speed-up over plain", title="Speed-up (dotted: predicted of decoding)")
    axes.legend(fontsize="small")


def _slots(axes: Axes, runs: Sequence[Run]) -> None:
    """At the lowest load."""
    from matplotlib.ticker import MaxNLocator

    for label, rows in _lines(runs):
        rates = rows[0].accepted_by_slot
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    axes.set(xlabel="slot", ylabel="share of rounds that accepted it", title="Acceptance by slot", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def _cycle(axes: Axes, runs: Sequence[Run]) -> None:
    """A bar per row: T_d, T_v and T_o where they are known, else the round as a whole; a mark is T_AR * emitted."""
    bars = [(f"{label}, {row.concurrency} at once", row) for label, rows in _lines(runs) for row in rows]
    places = range(len(bars))
    parts = {"T_d": "draft_ms", "T_v": "verify_ms", "T_o": "overhead_ms"}
    left = [0.0] * len(bars)
    for name, key in parts.items():
        times = [getattr(row.cycle, key) or 0.0 for _, row in bars]
        if any(times):
            axes.barh(places, times, left=left, label=name)
            left = [a + b for a, b in zip(left, times, strict=True)]
    rest = [max(0.0, row.cycle.round_ms - done) for (_, row), done in zip(bars, left, strict=True)]
    axes.barh(places, rest, left=left, label="T_round, not split", color="lightgrey")
    worth = [row.cycle.ar_ms * row.emitted_per_round for _, row in bars]
    axes.plot(worth, places, "k|", ms=14, label="the same tokens plainly")
    axes.set_yticks(places, [name for name, _ in bars], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="ms", title="One round")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
