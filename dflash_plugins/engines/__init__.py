"""What we know of the engines, as data: versions, flags, attention backends, limits and bugs, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, TypeAdapter

from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity

if TYPE_CHECKING:
    from dflash_plugins.config import DraftConfig

ENGINES = ("vllm", "sglang")

Trait = Literal[
    "mixed-layers", "non-causal", "sliding", "mrope", "sinks", "scaled", "embedding-scaled", "scaled-outside",
    "own-head", "own-embedding", "nested-causal", "flat-layout", "stateful", "multimodal", "quantised-head",
]  # fmt: skip
"""What rules in YAML may ask of a pair; ``rules.traits_of`` says which hold. The last three are the target's."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sign(_Data):
    """A text in a file of the engine's package that shows whether something is there, without importing the engine."""

    file: str
    text: str

    def seen(self, root: Path | None) -> bool | None:
        """Whether the engine installed in ``root`` shows it; None where there is no engine, or no such file."""
        file = None if root is None else root / self.file
        if file is None or not file.is_file():
            return None
        return self.text in file.read_text(encoding="utf-8", errors="replace")


class Architecture(_Data):
    """An architecture an engine serves: from which release on, where we saw it, or only through our plugin.

    ``needs``: of one of our plugin, the engine's own architecture whose method it is served by.
    """

    name: str
    first: str | None = None
    seen: tuple[str, ...] = ()
    plugin: bool = False
    needs: str | None = None
    sign: Sign | None = None
    source: str


class Condition(_Data):
    """A condition on one value; all parts that are given must hold.

    ``unset``: holds also where there is no value; ``absent``: holds only there.
    """

    equal: Any = None
    differs: Any = None
    above: float | None = None
    below: float | None = None
    like: tuple[str, ...] = ()
    unset: bool = False
    absent: bool = False


class When(_Data):
    """Conditions of a limit; all that are given must hold. ``settings`` and ``generation`` go by canonical name."""

    runner: Literal["v1", "v2"] | None = None
    platform: str | None = None
    methods: tuple[str, ...] | None = None
    traits: tuple[Trait, ...] = ()
    settings: Mapping[str, Condition] = {}
    generation: Mapping[str, Condition] = {}


class Limit(_Data):
    """Something an engine as shipped does not do with a pair.

    It holds from release ``since`` up to and without ``fixed``; where the engine is installed, ``sign`` decides.
    """

    id: str
    when: When
    severity: Severity
    key: str
    message: str
    mend: str
    source: str
    since: str | None = None
    fixed: str | None = None
    sign: Sign | None = None


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


class Flag(_Data):
    """A flag that rules read, by its canonical name: how the engine spells it, first the long way, and what it takes.

    ``planning``: no flag of the engine, but something a plan says of where it runs.
    """

    names: tuple[str, ...]
    kind: Literal["integer", "number", "switch", "text", "any"] = "text"
    planning: bool = False
    source: str = ""


class Backend(_Data):
    """An attention backend: whether it serves drafters that are not causal, and which KV dtypes (patterns) it holds."""

    non_causal: bool
    kv_cache_dtypes: tuple[str, ...] = ("*",)
    platforms: tuple[str, ...] = ()
    note: str = ""
    source: str


class EngineFacts(_Data):
    """One engine's file. The first of ``servers`` that can run serves; ``decided_flags`` name the pair.

    ``computes``: keys of a drafter's config that the engine serves by itself where neither core nor plugin do.
    """

    engine: str
    title: str
    distributions: tuple[str, ...]
    servers: tuple[Server, ...]
    decided_flags: tuple[str, ...]
    tokens_flag: str
    tokens_aliases: tuple[str, ...] = ()
    tokens_beyond_k: int
    default_runner: Mapping[str, str]
    variables: Mapping[str, Mapping[str, str]] = {}
    flags: Mapping[str, Flag]
    negated_flags: bool
    computes: Mapping[str, str]
    backends: Mapping[str, Backend]
    architectures: tuple[Architecture, ...]
    limits: tuple[Limit, ...]
    bugs: tuple[Bug, ...]

    def tokens(self, k: int) -> int:
        """The value of ``tokens_flag`` for K proposals: K in vLLM, the whole block in SGLang."""
        return k + self.tokens_beyond_k

    def architecture(self, name: str | None) -> Architecture | None:
        """The architecture of this name, by itself or through our plugin; None where it is not known here."""
        return next((one for one in self.architectures if one.name == name), None)


class Foreign(_Data):
    """An architecture that is not ours, known by name; ``served_by`` lists engine versions seen serving it.

    ``same_method``: an engine that serves it does so under the method of our drafters.
    """

    pattern: str
    what: str
    mend: str
    served_by: Mapping[str, tuple[str, ...]] = {}
    same_method: bool = False

    @property
    def served(self) -> str:
        """Where it was seen served, in words."""
        seen = [f"{engine} {', '.join(versions)}" for engine, versions in self.served_by.items() if versions]
        return f"seen served by {'; '.join(seen)}" if seen else "no engine version was seen serving it"


@dataclass(frozen=True)
class Launch:
    """Where a drafter is to run, as far as known; None means unknown, and unknown conditions only warn.

    ``root`` is the package of an engine that is installed here. Memory counts GiB of one device: all of it, and what is
    free now.
    """

    version: str | None = None
    runner: str | None = None
    platform: str | None = None
    root: Path | None = None
    memory_gib: float | None = None
    free_gib: float | None = None


def _load(name: str) -> Any:
    return yaml.safe_load(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def engine_facts(engine: str) -> EngineFacts:
    """The facts of ``vllm`` or ``sglang``; ``BadInput`` for another name."""
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is not known; known: {', '.join(ENGINES)}")
    return EngineFacts.model_validate(_load(f"{engine}.yaml"))


@cache
def known_flags(engine: str) -> frozenset[str]:
    """Flags of the engine's server, with underscores, in the versions seen."""
    return frozenset(_load("flags.yaml")[engine].split())


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


def at_least(version: Version, first: str) -> bool | None:
    """Whether ``version`` holds what came with release ``first``; None for a source build of just before it."""
    if version >= Version(first):
        return True
    return None if version.release >= Version(first).release else False


def known_bugs(engine: str, platform: str | None, version: str | None = None) -> tuple[Bug, ...]:
    """Bugs that may show on ``platform`` (None: any); a version listed as mended is left out."""
    bugs = engine_facts(engine).bugs
    return tuple(b for b in bugs if platform in (None, b.platform) and version not in b.gone)


def engine_findings(engine: str, config: DraftConfig, launch: Launch, origins: Mapping[str, str]) -> list[Finding]:
    """What ``engine`` as shipped makes of a drafter: its version, its limits, its bugs.

    ``origins`` maps fields to the paths they were read from (``DraftReading.origins``).
    """
    from dflash_plugins.engines.limits import limit_findings
    from dflash_plugins.rules import Facts

    facts = Facts(draft=config.model_dump(), config=config, origins=origins, engine=engine_facts(engine), launch=launch)
    return limit_findings(facts)
