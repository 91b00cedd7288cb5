"""What can be told of this machine without loading anything: the memory of its GPUs."""

from __future__ import annotations

import shutil
import subprocess

_QUERY = ("--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")


def gpu_memory(timeout_s: float = 1.0) -> tuple[float, float] | None:
    """GiB of the GPU with the most free memory: all of it, and what is free; None where no tool tells."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=timeout_s)  # noqa: S603
        rows = [[float(part) / 1024 for part in line.split(",")] for line in answer.stdout.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    pairs = [(row[1], row[0]) for row in rows if len(row) == 2]
    free, total = max(pairs, default=(None, None))
    return None if free is None or total is None else (total, free)
