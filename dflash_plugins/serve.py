"""Starting an engine's own server on a pair: checked before, K spelled as the engine spells it, nothing else added."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from dflash_plugins.check import inspect_pair
from dflash_plugins.engines import EngineFacts, Launch, Server, engine_facts
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity, errors

if TYPE_CHECKING:
    from rich.console import Console


class ServeReport(BaseModel):
    """What was found about a pair, and the command line that serves it; ``launch`` is empty where it is refused."""

    model_config = ConfigDict(frozen=True)

    findings: tuple[Finding, ...]
    launch: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 when an error was found, else 0."""
        return 0 if self.launch else 1

    def render(self, console: Console) -> None:
        """Errors and warnings, one per line, then the command line."""
        shown = [one for one in self.findings if one.severity is not Severity.INFO]
        for one in shown:
            console.print(f"{one.severity}: {one}", markup=False, highlight=False, soft_wrap=True)
        last = shlex.join(self.launch) if self.launch else f"refused: {len(errors(self.findings))} errors"
        console.print(last, markup=False, highlight=False, soft_wrap=True)


def plan(
    engine: str,
    target: Path,
    draft: Path,
    *,
    k: int | None = None,
    port: int | None = None,
    name: str | None = None,
    flags: Sequence[str] = (),
) -> ServeReport:
    """Check a pair and lay out the command line of the engine's server.

    ``k`` counts proposals (None: what ``flags`` say, else what the drafter was trained for); ``name`` is what clients
    call the model; ``flags`` go to the engine as they are. Raises ``BadInput`` for a flag that is decided here or
    disagrees with ``k``.
    """
    facts = engine_facts(engine)
    given = dict(_flags(flags))
    server = _server(facts)
    _refuse_decided(facts, server, given, port)
    said = _k_of(facts, given)
    if None not in (k, said) and k != said:
        raise BadInput(f"--k {k} and the engine's flags disagree, which ask for K = {said}: give one of the two")
    k = said if k is None else k
    settings = {facts.tokens_flag: facts.tokens(k)} if k is not None else {}
    launch = Launch(version=installed_version(facts))
    report = inspect_pair(draft, target, k=k, engine=engine, launch=launch, settings=settings)
    if report.draft is None or errors(report.findings):
        return ServeReport(findings=report.findings, launch=())
    own = [*server.arguments, str(target)]
    own += _draft_flags(facts, draft, report.draft.k if k is None else k, already=said is not None)
    own += [] if port is None else ["--port", str(port)]
    own += [] if name is None or "served_model_name" in given else ["--served-model-name", name]
    return ServeReport(findings=report.findings, launch=(sys.executable, "-m", server.module, *own, *flags))


def replace_process(launch: Sequence[str]) -> None:
    """Become the engine's server. Returns never."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(launch[0], list(launch))  # noqa: S606 - the command line is ours


def installed_version(facts: EngineFacts) -> str | None:
    """Of the engine in this environment, under whichever name its distribution goes."""
    return next(filter(None, map(_version_of, facts.distributions)), None)


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _server(facts: EngineFacts) -> Server:
    return next(one for one in facts.servers if one.needs is None or _version_of(one.needs))


def _draft_flags(facts: EngineFacts, draft: Path, k: int, *, already: bool) -> list[str]:
    """Flags that name the drafter and K. ``already``: the user's own flags say K."""
    if facts.engine == "vllm":
        speculation = {"method": "dflash", "model": str(draft), facts.tokens_flag: facts.tokens(k)}
        return ["--speculative-config", json.dumps(speculation)]
    found = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    return found if already else [*found, _spelled(facts.tokens_flag), str(facts.tokens(k))]


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name with underscores, value) of ``--name value``, ``--name=value`` and ``--name``."""
    for one, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        name, separator, value = one.lstrip("-").partition("=")
        if one.startswith("-") and name[:1].isalpha():
            yield name.replace("-", "_"), value if separator else None if following.startswith("--") else following


def _refuse_decided(facts: EngineFacts, server: Server, given: Iterable[str], port: int | None) -> None:
    """Also shortened flags, and parts of one (``--speculative-config.model``)."""
    if dropped := sorted(set(server.lacks) & set(given)):
        raise BadInput(f"{server.module} serves here, which has no {', '.join(map(_spelled, dropped))}")
    decided = {*facts.decided_flags, *(() if port is None else ("port",))}
    taken = [name for name in given if any(one.startswith(name.partition(".")[0]) for one in decided)]
    if taken:
        listed = ", ".join(map(_spelled, sorted(taken)))
        raise BadInput(f"engine flags that serve decides, use --target, --draft, --k and --port: {listed}")


def _k_of(facts: EngineFacts, given: dict[str, str | None]) -> int | None:
    """K by the engine's own flags, None where they do not say; ``BadInput`` where they are no such number."""
    found = {}
    for name in {facts.tokens_flag, *facts.tokens_aliases} & given.keys():
        value = given[name]
        if value is None or not value.isdigit() or int(value) <= facts.tokens_beyond_k:
            raise BadInput(f"{_spelled(name)} {value}: expected a number from {facts.tokens_beyond_k + 1} on")
        found[name] = int(value) - facts.tokens_beyond_k
    if len({*found.values()}) > 1:
        raise BadInput(f"{' and '.join(map(_spelled, sorted(found)))} disagree: give one of them")
    return next(iter(found.values()), None)


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
