"""Runs the alignment state machine for many random steps against its model of lists and records the outcome.

    python benchmarks/alignment_steps.py --steps 200000

The machine is the one the tests use (tests/alignment_machine.py); a step is one rule. A failure stops the run with
Hypothesis' shortest example and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import dflash_plugins

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from alignment_machine import AlignmentMachine, steps

STEPS_PER_LIFE = 50


def run(wanted: int) -> dict[str, object]:
    """Run at least ``wanted`` steps; returns the record."""
    rounds = settings(
        max_examples=500,
        stateful_step_count=STEPS_PER_LIFE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    begun = time.monotonic()
    while sum(steps.values()) < wanted:
        run_state_machine_as_test(AlignmentMachine, settings=rounds)
        print(f"{sum(steps.values()):,} of {wanted:,} steps", file=sys.stderr)
    return {
        "what": "alignment state machine against a model of lists",
        "date": datetime.now(UTC).date().isoformat(),
        "steps": sum(steps.values()),
        "steps_by_rule": dict(sorted(steps.items())),
        "failures": 0,
        "seconds": round(time.monotonic() - begun, 1),
        "versions": {
            "python": platform.python_version(),
            "dflash-plugins": dflash_plugins.__version__,
            "hypothesis": version("hypothesis"),
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "alignment_steps.json")
    options = parser.parse_args()
    record = run(options.steps)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
