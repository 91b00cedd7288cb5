"""The tables of docs/drafters.md out of what ``benchmarks/drafters.py`` and ``dflash-plugins bench --json`` printed.

    python benchmarks/drafters_table.py benchmarks/results/drafters/*.json

Of the first, a line per drafter and K: emitted per round over all prompts and by set, and the ratio to the first
drafter of the same file with its 95 % interval. Of the second, a line per K and load: rates, their ratio, and where the
time of a round went.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def lines(document: dict[str, Any]) -> Iterator[str]:
    """A Markdown table of one result."""
    rows = document["rows"]
    sets = list(dict.fromkeys(row["set"] for row in rows if row["set"] != "all"))
    cells = {(row["draft"], row["k"], row["set"]): row for row in rows}
    yield f"| drafter | K | emitted per round | {' | '.join(sets)} | accepted by slot | beside the first |"
    yield "|" + "---|" * (len(sets) + 5)
    first = rows[0]["draft"]
    for draft, k in dict.fromkeys((row["draft"], row["k"]) for row in rows):
        whole = cells[draft, k, "all"]
        by_set = " | ".join(f"{cells[draft, k, one]['emitted_per_round']:.3f}" for one in sets)
        slots = " ".join(f"{rate:.3f}" for rate in whole["accepted_by_slot"])
        beside = "" if draft == first else "{:.3f} ({:.3f} to {:.3f})".format(whole["ratio"], *whole["ci95"])
        yield f"| {draft} | {k} | {whole['emitted_per_round']:.3f} | {by_set} | {slots} | {beside} |"


def speeds(document: dict[str, Any]) -> Iterator[str]:
    """The same of a run of ``bench``."""
    heads = ("drafter", "K", "at once", "emitted per round", "plain tokens/s", "tokens/s", "speed-up")
    yield f"| {' | '.join(heads)} | round ms: drafter, target, rest |"
    yield "|" + "---|" * (len(heads) + 1)
    for row in document["rows"]:
        cycle = row["cycle"]
        parts = [cycle[name] for name in ("draft_ms", "verify_ms", "overhead_ms")]
        spent = "not split" if None in parts else ", ".join(f"{part:.1f}" for part in parts)
        low, high = row["speedup_ci95"] or (float("nan"), float("nan"))
        yield (
            f"| {document['draft']} | {row['k']} | {row['concurrency']} | {row['emitted_per_round']:.2f} "
            f"| {row['plain_tps']:.1f} | {row['spec_tps']:.1f} | {row['speedup']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {cycle['round_ms']:.1f}: {spent} |"
        )


def main(paths: Sequence[str]) -> int:
    """Command line."""
    for path in paths:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        measured = "runs" in document  # of bench
        about = (
            f"{document['engine']}, {document['dtype']}, {document['prompts']} prompts, {document['max_tokens']} tokens"
        )
        about += f", {document['runs']} runs" if measured else f", {document['batch']} at once"
        print(f"\n{Path(path).stem}: {about}\n")
        print("\n".join(speeds(document) if measured else lines(document)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
