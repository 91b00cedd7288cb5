"""What the core asks of an engine, and the worker process behind which an engine lives.

An adapter fulfils ``EngineDriver`` and is found through the entry-point group ``dflash_plugins.drivers``. A driver
starts sessions; a session is one engine with one fixed configuration. ``WorkerProcess`` is a session in a process of
its own that answers JSON lines: requests on its stdin, answers on its stdout, everything the engine prints in a log.

Requests are ``{"op": "encode" | "generate", ...}``; answers are any number of ``{"progress": [done, total]}`` and
then one ``{"result": ...}`` or ``{"error": text}``. The first answer of a worker, unasked, is its ``Hello``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

from dflash_plugins.errors import BadInput, DFlashPluginsError, EngineMissing
from dflash_plugins.pairs.prompts import Prompt

GROUP = "dflash_plugins.drivers"
CLOSE_SECONDS = 10.0
LOG_TAIL_LINES = 8

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class EngineError(DFlashPluginsError):
    """The engine refused its configuration, answered with an error, or its process died."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Record):
    """Everything that decides what an engine computes. Without ``draft`` the engine decodes plainly.

    ``k`` counts proposals per round, ``memory_share`` is the part of an accelerator that this engine may fill when
    several are alive at once, ``extra`` holds arguments under the engine's own names.
    """

    target: str
    draft: str | None = None
    k: int | None = Field(default=None, gt=0)
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    dtype: str = "float32"
    max_num_seqs: int = Field(default=1, gt=0)
    max_model_len: int = Field(default=2048, gt=0)
    seed: int = 0
    memory_share: float = Field(default=1.0, gt=0, le=1)
    extra: Mapping[str, Any] = Field(default_factory=dict)

    def plain(self) -> EngineConfig:
        """The same engine without speculation: nothing else differs."""
        return self.model_copy(update={"draft": None, "k": None, "draft_sample_method": "greedy"})


class Sampling(_Record):
    """How to continue a prompt.

    ``logits`` asks for the raw logits of that many best tokens at every position, ``rounds`` for what every round
    emitted, ``times`` for when tokens came, which an engine that cannot say leaves out.
    """

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_tokens: int = Field(default=128, gt=0)
    ignore_eos: bool = False
    seed: int | None = None
    logits: int | None = Field(default=None, gt=0)
    rounds: bool = False
    times: bool = False


class Hello(_Record):
    """First answer of a worker: what runs, and the flags in force after the engine's own defaults.

    ``flags`` holds what decides the computation besides speculation and the seed, ``max_model_len`` among it.
    """

    engine: str
    version: str
    flags: Mapping[str, Any]


class Completion(_Record):
    """One continuation.

    ``logits`` holds, when asked for, the best (id, raw logit) pairs per position, best first; ``emitted`` the number of
    tokens of every round. The first token comes of the prompt, before any round; the last round may have been cut.
    ``arrivals`` holds the seconds from the batch's start to the first token and to the end of every round after it.
    """

    ids: tuple[int, ...]
    text: str | None
    finish_reason: str | None
    logits: tuple[tuple[tuple[int, float], ...], ...] | None = None
    emitted: tuple[int, ...] | None = None
    arrivals: tuple[float, ...] | None = None


class Counters(_Record):
    """Sums over rounds. ``accepted_by_slot[i]`` counts the rounds that accepted more than i proposals."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_by_slot: tuple[int, ...] = ()

    def __add__(self, other: Counters) -> Counters:
        width = max(len(self.accepted_by_slot), len(other.accepted_by_slot))
        mine, theirs = (
            slots + (0,) * (width - len(slots)) for slots in (self.accepted_by_slot, other.accepted_by_slot)
        )
        return Counters(
            rounds=self.rounds + other.rounds,
            proposed=self.proposed + other.proposed,
            accepted=self.accepted + other.accepted,
            accepted_by_slot=tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def emitted_per_round(self) -> float:
        """Mean of accepted + 1 over the rounds; 1.0 when there was no round, as in plain decoding."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def rates_by_slot(self) -> tuple[float, ...]:
        """Part of all rounds in which each slot was accepted (unconditional)."""
        return tuple(count / self.rounds for count in self.accepted_by_slot) if self.rounds else ()


class Generated(_Record):
    """Answer to one ``generate``: a completion per prompt, wall seconds in the engine, and what speculation did.

    ``parts`` holds, where times were asked for and the engine can be timed inside, the seconds that drafter and target
    took in every step that was a round of all its requests.
    """

    completions: tuple[Completion, ...]
    seconds: float
    counters: Counters
    parts: tuple[tuple[float, float], ...] | None = None

    @property
    def tokens(self) -> int:
        """Number of generated tokens over all prompts."""
        return sum(len(completion.ids) for completion in self.completions)


class EngineSession(Protocol):
    """One running engine. Closing it twice is allowed; leaving its ``with`` block closes it."""

    hello: Hello

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as one user message in the target's chat template, or as it is without one."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generated:
        """Continue all prompts in one batch; ``progress`` is told finished and all prompts."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class EngineDriver(Protocol):
    """How an adapter starts its engine."""

    name: str

    def missing(self) -> str | None:
        """Why the engine cannot run in this environment, or None. Imports no engine."""

    def start(self, config: EngineConfig) -> EngineSession:
        """Start an engine and wait until it can answer; raises EngineError with the engine's own reason."""


def known_engines() -> tuple[str, ...]:
    """Names of the engines whose adapters are installed."""
    return tuple(sorted(point.name for point in entry_points(group=GROUP)))


def find_driver(engine: str) -> EngineDriver:
    """The driver of an engine; raises BadInput for an unknown name, EngineMissing when it is not installed."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if engine not in points:
        known = ", ".join(sorted(points)) or "none: install the distribution dflash-plugins"
        raise BadInput(f"no driver for engine {engine!r}; known: {known}")
    driver: EngineDriver = points[engine].load()()
    if (reason := driver.missing()) is not None:
        raise EngineMissing(reason)
    return driver


class WorkerProcess:
    """An ``EngineSession`` in a process of its own, so that several engines can be alive and any of them may die."""

    hello: Hello

    def __init__(
        self, argv: Sequence[str], config: EngineConfig, environment: Mapping[str, str], *, verbose: bool = False
    ) -> None:
        """Start ``argv`` with the configuration as last argument; ``verbose`` lets the engine write to our stderr."""
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed with the process
        # A session of its own: an interrupt reaches us alone, and closing can end whatever the engine itself started.
        self._process = subprocess.Popen(  # noqa: S603 - argv is ours
            [*argv, config.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else self._log,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            self.hello = Hello.model_validate(self._answer(None))
        except BaseException:
            self.close()
            raise

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``EngineSession.encode``."""
        return [[int(i) for i in ids] for ids in self._ask({"op": "encode", "texts": list(texts)}, None)]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generated:
        """See ``EngineSession.generate``."""
        request = {"op": "generate", "prompts": [list(p) for p in prompts], "sampling": sampling.model_dump()}
        return Generated.model_validate(self._ask(request, progress))

    def close(self) -> None:
        """End the process and everything it started."""
        if self._log.closed:
            return
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any], progress: Callable[[int, int], None] | None) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise EngineError(self._obituary()) from error
        return self._answer(progress)

    def _answer(self, progress: Callable[[int, int], None] | None) -> Any:
        for message in self._messages():
            if "error" in message:
                raise EngineError(f"the engine answered with an error: {message['error']}")
            if "result" in message:
                return message["result"]
            if progress is not None:
                progress(*message["progress"])
        raise EngineError(self._obituary())

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)

    def _obituary(self) -> str:
        """How the process ended, with the last lines it wrote."""
        if self._log.closed:
            return "the engine process was closed before this request"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        tail = "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:]) or "  (it wrote nothing)"
        return (
            f"the engine process ended unexpectedly (exit status {self._process.returncode}); its last lines:\n{tail}"
        )


def flag_differences(plain: Hello, speculative: Hello) -> dict[str, tuple[Any, Any]]:
    """Flags in force that differ between two engines which should differ in speculation only."""
    keys = sorted({*plain.flags, *speculative.flags})
    pairs = {key: (plain.flags.get(key), speculative.flags.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def require_comparable(plain: Hello, speculative: Hello) -> None:
    """Refuse an A/B of engines that differ in more than speculation; raises BadInput naming every flag."""
    if plain.version != speculative.version:
        raise BadInput(f"A/B of different engine versions: {plain.version} and {speculative.version}")
    if differing := flag_differences(plain, speculative):
        listed = ", ".join(f"{key} ({a!r} and {b!r})" for key, (a, b) in differing.items())
        raise BadInput(f"A/B differs in {len(differing)} flags besides speculation: {listed}")


def encode_prompts(session: EngineSession, prompts: Sequence[Prompt], room: int) -> list[list[int]]:
    """Token ids of the prompts; raises BadInput naming those that leave no ``room`` tokens in the engine."""
    limit = int(session.hello.flags["max_model_len"])
    texts = [prompt.prompt for prompt in prompts if prompt.prompt is not None]
    encoded = iter(session.encode(texts) if texts else [])
    ids = [list(prompt.ids) if prompt.ids is not None else next(encoded) for prompt in prompts]
    long = [f"{prompt.id} ({len(row)})" for prompt, row in zip(prompts, ids, strict=True) if len(row) + room > limit]
    if long:
        raise BadInput(f"prompts too long for {room} more tokens within {limit}: {', '.join(long)}")
    return ids
