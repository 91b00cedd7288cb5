"""What every engine's worker process shares: the channel to the parent, and answering it until it goes away.

The protocol is that of ``dflash_plugins.driver``. A worker imports its engine only after ``Channel`` has turned the
engine's output away from what carries the answers; processes that the engine starts do not inherit it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

from dflash_plugins.driver import Counters, EngineConfig, Generated, Hello, Sampling


class EngineWorker(Protocol):
    """One engine and the things that the core asks of it."""

    def hello(self) -> Hello:
        """What runs."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``EngineSession.encode``."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generated:
        """See ``EngineSession.generate``."""


class Channel:
    """Requests in, answers out. When the parent closes its end nobody waits any more, and the process ends at once."""

    def __init__(self) -> None:
        self._answers: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what the engine prints goes to the log
        requests = os.fdopen(os.dup(0), encoding="utf-8")
        with open(os.devnull, encoding="utf-8") as nothing:  # noqa: PTH123 - a file descriptor is wanted
            os.dup2(nothing.fileno(), 0)
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, args=(requests,), daemon=True).start()

    def _listen(self, requests: IO[str]) -> None:
        for line in requests:
            self._requests.put(json.loads(line))
        os._exit(0)  # also in the middle of a batch: an orphan would decode for nobody

    def next(self) -> dict[str, Any]:
        """The next request; waits for it."""
        return self._requests.get()

    def send(self, message: dict[str, Any]) -> None:
        """Send one answer."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def run(start: Callable[[EngineConfig, Channel], EngineWorker]) -> None:
    """A worker's ``main``: ``start`` the engine that the last argument describes, greet, and serve."""
    channel = Channel()
    try:
        worker = start(EngineConfig.model_validate_json(sys.argv[1]), channel)
    except Exception as error:
        traceback.print_exc()
        channel.send({"error": describe(error)})
        sys.stdout.flush()
        os._exit(1)
    channel.send({"result": worker.hello().model_dump(mode="json")})
    serve(channel, worker)


def serve(channel: Channel, worker: EngineWorker) -> None:
    """Answer requests until the parent closes the channel."""
    while True:
        request = channel.next()
        try:
            if request["op"] == "encode":
                channel.send({"result": worker.encode(request["texts"])})
            else:
                sampling = Sampling.model_validate(request["sampling"])
                channel.send({"result": worker.generate(request["prompts"], sampling).model_dump(mode="json")})
        except Exception as error:
            traceback.print_exc()
            channel.send({"error": describe(error)})


def describe(error: BaseException) -> str:
    """One line: the innermost reason is what the user can act on."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: " + " ".join(str(error).split())


def encode_messages(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text as ``EngineSession.encode`` says. ``tokenizer`` is that of transformers, or None."""
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: give prompts as ids")
    if not getattr(tokenizer, "chat_template", None):
        return [list(tokenizer.encode(text)) for text in texts]
    messages = [[{"role": "user", "content": text}] for text in texts]
    template: Any = tokenizer.apply_chat_template
    rendered = [template(m, tokenize=False, add_generation_prompt=True) for m in messages]
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in rendered]


def difference(before: Counters, after: Counters) -> Counters:
    """What one batch added to the engine's running counters."""
    slots = before.accepted_by_slot or (0,) * len(after.accepted_by_slot)
    return Counters(
        rounds=after.rounds - before.rounds,
        proposed=after.proposed - before.proposed,
        accepted=after.accepted - before.accepted,
        accepted_by_slot=tuple(b - a for a, b in zip(slots, after.accepted_by_slot, strict=True)),
    )
