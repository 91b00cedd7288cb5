"""What we know of the engines, as data: versions, limits and bugs, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import yaml
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, TypeAdapter

from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity

if TYPE_CHECKING:
    from dflash_plugins.config import DraftConfig

ENGINES = ("vllm", "sglang")


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Architecture(_Data):
    """An architecture an engine serves: from which release on, where we saw it, or only through our plugin."""

    name: str
    first: str | None = None
    seen: tuple[str, ...] = ()
    plugin: bool = False
    source: str


class When(_Data):
    """Conditions of a limit; all that are given must hold."""

    runner: Literal["v1", "v2"] | None = None
    platform: str | None = None
    methods: tuple[str, ...] | None = None
    layers: Literal["mixed"] | None = None
    scaled: bool | None = None
    scaled_at: Literal["outside"] | None = None
    embedding_scaled: bool | None = None
    own_head: bool | None = None
    causal_at: str | None = None


class Limit(_Data):
    """Something an engine as shipped does not do with a drafter."""

    id: str
    when: When
    severity: Severity
    key: str
    message: str
    mend: str
    source: str


class Bug(_Data):
    """A fault of the engine itself; ``probe`` names the numerical test that decides, versions only inform."""

    id: str
    platform: str
    seen: tuple[str, ...]
    gone: tuple[str, ...] = ()
    probe: str
    symptom: str
    mend: str
    switch: str
    source: str


class Server(_Data):
    """A module that serves, its ``arguments`` up to the target, what it ``needs`` installed, and flags it ``lacks``."""

    module: str
    arguments: tuple[str, ...] = ()
    needs: str | None = None
    lacks: tuple[str, ...] = ()


class EngineFacts(_Data):
    """One engine's file. The first of ``servers`` that can run serves; ``decided_flags`` name the pair."""

    engine: str
    title: str
    distributions: tuple[str, ...]
    servers: tuple[Server, ...]
    decided_flags: tuple[str, ...]
    tokens_flag: str
    tokens_aliases: tuple[str, ...] = ()
    tokens_beyond_k: int
    default_runner: Mapping[str, str]
    architectures: tuple[Architecture, ...]
    limits: tuple[Limit, ...]
    bugs: tuple[Bug, ...]

    def tokens(self, k: int) -> int:
        """The value of ``tokens_flag`` for K proposals: K in vLLM, the whole block in SGLang."""
        return k + self.tokens_beyond_k


class Foreign(_Data):
    """An architecture that is not ours, known by name; ``served`` lists engine versions seen serving it."""

    pattern: str
    what: str
    mend: str
    served_by: Mapping[str, tuple[str, ...]] = {}

    @property
    def served(self) -> str:
        seen = [f"{engine} {', '.join(versions)}" for engine, versions in self.served_by.items() if versions]
        return f"seen served by {'; '.join(seen)}" if seen else "no engine version was seen serving it"


@dataclass(frozen=True)
class Launch:
    """Where a drafter is to run, as far as known; None means unknown, and unknown conditions only warn."""

    version: str | None = None
    runner: str | None = None
    platform: str | None = None


def _load(name: str) -> Any:
    return yaml.safe_load(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def engine_facts(engine: str) -> EngineFacts:
    """The facts of ``vllm`` or ``sglang``; ``BadInput`` for another name."""
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is not known; known: {', '.join(ENGINES)}")
    return EngineFacts.model_validate(_load(f"{engine}.yaml"))


@cache
def foreign_architectures() -> tuple[Foreign, ...]:
    """Known architectures that are not ours, in the order in which their patterns are tried."""
    return TypeAdapter(tuple[Foreign, ...]).validate_python(_load("foreign.yaml"))


def foreign_architecture(name: str) -> Foreign | None:
    """The first entry whose pattern matches ``name``."""
    return next((f for f in foreign_architectures() if fnmatchcase(name, f.pattern)), None)


def parse_version(text: str) -> Version | None:
    """A version with any local part (``0.28.1rc1.dev43+g6f7df92a8``, ``0.21.0+empty``); None when it is none."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def known_bugs(engine: str, platform: str | None, version: str | None = None) -> tuple[Bug, ...]:
    """Bugs that may show on ``platform`` (None: any); a version listed as mended is left out."""
    bugs = engine_facts(engine).bugs
    return tuple(b for b in bugs if platform in (None, b.platform) and version not in b.gone)


def engine_findings(engine: str, config: DraftConfig, launch: Launch, origins: Mapping[str, str]) -> list[Finding]:
    """What ``engine`` as shipped makes of a drafter: its version, its limits, its bugs.

    ``origins`` maps fields to the paths they were read from (``DraftReading.origins``).
    """
    facts = engine_facts(engine)
    runner = launch.runner or facts.default_runner.get(launch.platform or "")
    found = _version_findings(facts, config.architecture, launch.version)
    for limit in facts.limits:
        holds = _holds(limit.when, config, Launch(launch.version, runner, launch.platform), origins)
        if holds is not False:
            found.append(_limit_finding(limit, config, certain=holds is True))
    if launch.platform is not None:
        found += [_bug_finding(b) for b in known_bugs(engine, launch.platform, launch.version)]
    return found


def _version_findings(facts: EngineFacts, architecture: str, version: str | None) -> list[Finding]:
    known = next((a for a in facts.architectures if a.name == architecture), None)
    if version is None or known is None or known.first is None:
        return []
    parsed = parse_version(version)
    if parsed is None:
        return [
            Finding.of(
                Severity.WARNING,
                "engine-version-unknown",
                "engine_version",
                version,
                "is no version that can be compared",
                "give a version like 0.31.0",
            )
        ]
    if parsed >= Version(known.first):
        return []
    # A source build just before the release may already hold it: only the release number decides.
    early = parsed.release >= Version(known.first).release
    return [
        Finding.of(
            Severity.WARNING if early else Severity.ERROR,
            "engine-too-old",
            "engine_version",
            version,
            f"{facts.title} serves {architecture} from {known.first} on",
            f"use {facts.title} {known.first} or later, or a version our plugin supports",
        )
    ]


def _holds(when: When, config: DraftConfig, launch: Launch, origins: Mapping[str, str]) -> bool | None:
    """True, False, or None when only the launch could tell."""
    scaled = [
        n
        for n in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        if getattr(config, n) not in (None, 1.0)
    ]
    facts = {
        "methods": config.method,
        "layers": "mixed" if len({w is None for w in config.windows}) > 1 else "uniform",
        "scaled": bool(scaled),
        "scaled_at": "outside"
        if any(not origins.get(n, "").startswith("dflash_config.") for n in scaled)
        else "nested",
        "embedding_scaled": "input_embedding_scale" in scaled,
        "own_head": config.draft_vocab_size not in (None, config.vocab_size),
        "causal_at": origins.get("causal"),
    }
    wanted = when.model_dump(exclude_none=True)
    for name in facts.keys() & wanted.keys():
        allowed = wanted[name] if isinstance(wanted[name], tuple) else (wanted[name],)
        if facts[name] not in allowed:
            return False
    return _launch_holds(wanted, launch)


def _launch_holds(wanted: Mapping[str, Any], launch: Launch) -> bool | None:
    conditions = [(wanted[n], getattr(launch, n)) for n in ("runner", "platform") if n in wanted]
    if any(actual is not None and actual != want for want, actual in conditions):
        return False
    return None if any(actual is None for _, actual in conditions) else True


def _limit_finding(limit: Limit, config: DraftConfig, *, certain: bool) -> Finding:
    severity = limit.severity if certain else Severity.WARNING
    condition = "" if certain else f" (if the runner is {limit.when.runner})"
    value = config.architecture if limit.key == "architectures" else None
    return Finding.of(severity, limit.id, limit.key, value, limit.message + condition, limit.mend)


def _bug_finding(bug: Bug) -> Finding:
    return Finding.of(
        Severity.INFO, bug.id, "platform", bug.platform, bug.symptom, f"{bug.mend} ({bug.switch}=1 switches that off)"
    )
