"""The tables of docs/drafters.md out of what ``benchmarks/drafters.py`` printed.

    python benchmarks/drafters_table.py benchmarks/results/drafters/*.json

A line per drafter and K: emitted per round over all prompts and by set, and the ratio to the first drafter of the same
file with its 95 % interval.
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


def main(paths: Sequence[str]) -> int:
    """Command line."""
    for path in paths:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        about = (
            f"{document['engine']}, {document['dtype']}, {document['prompts']} prompts, {document['max_tokens']} tokens"
        )
        print(f"\n{Path(path).stem}: {about}, {document['batch']} at once\n")
        print("\n".join(lines(document)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
