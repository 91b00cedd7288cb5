"""What a training run tells while it goes on: a sentence beside the progress bar, and lines in a file of the run."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_plugins.errors import BadInput
from dflash_plugins.train.trainer import Progress
from dflash_plugins.whole_file import whole_file

LOG_FILE = "training-log.jsonl"
SMOOTHED = 100


@dataclass
class Journal:
    """Of the run in ``folder``, which is at ``step``: what an older leg wrote of later steps is forgotten.

    Lines are objects with ``step``, ``loss`` (mean of the last steps), ``blocks_per_second``, ``k``, ``accuracy`` by
    slot, and where they were walked ``held_out`` rounds with ``k``, ``emitted_per_round`` and ``accepted_by_slot``.
    ``BadInput`` where the file cannot be written.
    """

    folder: Path
    step: int
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=SMOOTHED))
    _slots: str = ""
    _held_out: str = ""

    def __post_init__(self) -> None:
        path = self.folder / LOG_FILE
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if self._is_past(line)]
            with whole_file(path) as beside:
                beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def loss(self) -> float | None:
        """Mean of the last losses; None before the first."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    def add(self, progress: Progress) -> str:
        """Takes a step in; the sentence that says how the run goes."""
        self.losses.append(progress.loss)
        if progress.accuracy is not None:
            self._slots = f", K {progress.k} slots right {_rates(progress.accuracy)}"
        if progress.held_out is not None:
            self._held_out = f", held out {progress.held_out.emitted_per_round:.2f} emitted"
        if progress.accuracy is not None or progress.held_out is not None:
            self._write(progress)
        return f"loss {self.loss():.3f}{self._slots}{self._held_out}"

    def _write(self, progress: Progress) -> None:
        line: dict[str, Any] = {
            "step": progress.step, "loss": self.loss(), "blocks_per_second": progress.blocks_per_second,
            "k": progress.k, "accuracy": progress.accuracy,
        }  # fmt: skip
        if (found := progress.held_out) is not None:
            slots = found.accepted_by_slot
            line["held_out"] = {
                "k": len(slots), "emitted_per_round": found.emitted_per_round, "accepted_by_slot": slots,
            }  # fmt: skip
        path = self.folder / LOG_FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise BadInput(
                f"{path} takes no more lines: {error}. Saved steps stay; the same command goes on"
            ) from error

    def _is_past(self, line: str) -> bool:
        """Not of a step to come, and not broken off by a kill."""
        try:
            return bool(json.loads(line)["step"] <= self.step)
        except (ValueError, KeyError, TypeError):
            return False


def _rates(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.2f}".lstrip("0") for value in values)
