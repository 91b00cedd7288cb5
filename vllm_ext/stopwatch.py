"""How long the drafter and the target take inside a step of vLLM. Imports no engine.

Only where a call returns when its work is done, which is on a CPU, and on the V1 runner, whose parts are methods.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

DRAFT = ("propose_draft_token_ids",)
PATH = ("llm_engine", "engine_core", "engine_core", "model_executor", "driver_worker", "worker", "model_runner")
VERIFY = ("_model_forward", "model.compute_logits")


class Stopwatch:
    """Seconds since ``restart`` in the drafter and in the target, the head included."""

    def __init__(self) -> None:
        self.draft = self.verify = 0.0

    def restart(self) -> None:
        self.draft = self.verify = 0.0

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                setattr(self, part, getattr(self, part) + time.perf_counter() - began)

        return timed

    @contextlib.contextmanager
    def on(self, runner: Any) -> Iterator[None]:
        """Time a runner inside the block; afterwards it is as before."""
        with contextlib.ExitStack() as undo:
            for part, names in (("draft", DRAFT), ("verify", VERIFY)):
                for path in names:
                    *outer, name = path.split(".")
                    owner = getattr(runner, outer[0]) if outer else runner
                    undo.callback(_put_back, owner, name, vars(owner).get(name))
                    setattr(owner, name, self._timed(part, getattr(owner, name)))
            yield


def _put_back(owner: Any, name: str, own: Any) -> None:
    """``own`` is what the object itself held under that name; without it, its class answers again."""
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def runner_of(llm: Any, *, on_cpu: bool) -> Any:
    """The V1 runner of an in-process ``vllm.LLM`` on a CPU; None for any other, whose parts cannot be timed so."""
    if not on_cpu:
        return None
    found = llm
    for name in PATH:
        found = getattr(found, name, None)
    model = getattr(found, "model", None)
    fits = hasattr(found, DRAFT[0]) and hasattr(found, VERIFY[0]) and hasattr(model, "compute_logits")
    return found if fits else None
