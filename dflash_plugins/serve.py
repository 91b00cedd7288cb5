"""Starting an engine's own server on a pair: checked before, K spelled as the engine spells it, nothing else added."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dflash_plugins.check import inspect_pair
from dflash_plugins.config_models import DraftConfig
from dflash_plugins.engines import EngineFacts, Launch, Server, engine_facts, parse_version
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity, errors
from dflash_plugins.hardware import gpu_memory
from dflash_plugins.hub import Model
from dflash_plugins.matrix import AtHand, Standing, read_matrix, standing_of
from dflash_plugins.report import CheckReport, DraftSummary, EngineSummary, MatrixSummary, ServeReport
from dflash_plugins.settings import SPECULATION, command_flags, flag_value, read_settings, spelled

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


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
    given = dict(flags_of(flags))
    server = _server(facts)
    _refuse_decided(facts, server, given, port)
    own = [] if port is None else ["--port", str(port)]
    own += [] if name is None or "served_model_name" in given else ["--served-model-name", name]
    pair = Model(str(target), target), Model(str(draft), draft)
    planning = {name for flag in facts.flags.values() if flag.planning for name in flag.names}
    settings = {
        key: None if value is None else flag_value(value) for key, value in given.items() if key not in planning
    }  # vLLM has a --runner, too
    k, fields = _report(facts, pair, k, settings, launch_of(facts, None, settings))
    said = facts.engine == "sglang" and _k_of(facts, settings) is not None
    command = [sys.executable, "-m", server.module, *server.arguments, *_pair_flags(facts, pair, None if said else k)]
    return ServeReport(**fields, k=k, launch=() if fields["verdict"] == "refused" else (*command, *own, *flags))


def check(
    engine: str,
    target: Model,
    draft: Model,
    *,
    k: int | None = None,
    version: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> CheckReport:
    """Every finding on a pair and a planned launch, whether or not the engine is installed.

    ``version`` overrides what is installed; ``settings`` are the engine's flags with underscores, and what only a plan
    says (``EngineFacts.flags``). Raises ``BadInput`` as ``plan``.
    """
    facts = engine_facts(engine)
    settings = settings or {}
    decided = {*facts.decided_flags, f"{SPECULATION}model", f"{SPECULATION}method"} & settings.keys()
    if decided:
        raise BadInput(f"--set {', '.join(sorted(decided))}: use --target, --draft and --k")
    launch = launch_of(facts, version, settings)
    k, fields = _report(facts, (target, draft), k, settings, launch, planned=True)
    arguments, speculation = command_flags(facts, read_settings(facts, settings)[0])
    python, server = (sys.executable, _server(facts)) if launch.root else ("python", _elsewhere(facts, launch))
    command = [*_variables(facts, launch), python, "-m", server.module, *server.arguments]
    command += [*_pair_flags(facts, (target, draft), k, speculation), *arguments]
    return CheckReport(**fields, launch=() if fields["verdict"] == "refused" else tuple(command))


def _report(
    facts: EngineFacts,
    pair: tuple[Model, Model],
    k: int | None,
    settings: Mapping[str, Any],
    launch: Launch,
    *,
    planned: bool = False,
) -> tuple[int | None, dict[str, Any]]:
    """K to serve, and the fields of a report but its command line; ``planned``: nobody is about to start this here."""
    target, draft = pair
    said = _k_of(facts, settings)
    if None not in (k, said) and k != said:
        raise BadInput(f"--k {k} and the engine's flags disagree, which ask for K = {said}: give one of the two")
    k = said if k is None else k
    found = inspect_pair(draft.folder, target.folder, k=k, engine=facts.engine, launch=launch, settings=settings)
    runner = launch.runner or facts.default_runner.get(launch.platform or "")
    matrix = _standing(facts, launch, found.draft, pair, runner)
    # That a pair is untested, as most are, is no finding.
    tested = [] if matrix.status == "untested" else [matrix.finding()]
    findings = [*found.findings, *tested, *(_unversioned if planned else _unset)(facts, launch)]
    version_from = None if launch.version is None else "installed" if launch.root else "given"
    about = {"version": launch.version, "version_from": version_from, "platform": launch.platform, "runner": runner}
    trained = None if found.block_size is None else found.block_size - 1
    return trained if k is None else k, {
        "target": target.label,
        "draft_name": draft.label,
        "engine": EngineSummary(name=facts.engine, **about),  # type: ignore[arg-type]
        "verdict": "refused" if errors(findings) else "engine-alone" if found.alone else "ok",
        "findings": tuple(sorted(findings, key=lambda f: list(Severity).index(f.severity))),
        "draft": None if found.draft is None else DraftSummary.of(found.draft, found.dtype),
        "matrix": MatrixSummary(status=matrix.status, rows=matrix.rows, statement=str(matrix)),
    }


def _standing(
    facts: EngineFacts, launch: Launch, config: DraftConfig | None, pair: tuple[Model, Model], runner: str | None
) -> Standing:
    """What the matrix says."""
    if config is None or (version := parse_version(launch.version or "")) is None:
        return Standing("untested")
    return standing_of(read_matrix().rows, AtHand(facts.engine, version.public, *pair, config.fingerprint, runner))


def _unversioned(facts: EngineFacts, launch: Launch) -> list[Finding]:
    if launch.version is not None:
        return []
    message = f"is not known, since {facts.title} is not installed here: what depends on it is not checked"
    mend = "give --engine-version"
    return [Finding.of(Severity.INFO, "engine-version-missing", "engine_version", None, message, mend)]


def launch_of(facts: EngineFacts, version: str | None, settings: Mapping[str, Any]) -> Launch:
    """Where a pair is to run: as planned in ``settings``, else as found on this machine where the engine is installed.

    ``version`` overrides the engine that is installed, of which then nothing else counts either.
    """
    flags, _ = read_settings(facts, settings)
    said = {name: flags[name].value for name in ("runner", "device", "memory_gib", "free_gib") if name in flags}
    root = _package(facts) if version is None else None
    runner = said.get("runner") or (_runner_asked_for() if root and "runner" in facts.flags else None)
    if runner not in (None, "v1", "v2"):
        raise BadInput(f"runner {runner}: known are v1 and v2")
    version = version or (installed_version(facts) if root else None)
    platform = str(said["device"]).partition(":")[0] if "device" in said else _platform(facts, version, root)
    memory = (said.get("memory_gib"), said.get("free_gib"))
    if root is not None and platform != "cpu" and memory == (None, None):
        memory = gpu_memory() or memory
    return Launch(version, runner, platform, root, *memory)


def _runner_asked_for() -> str | None:
    """What the environment tells vLLM, which is about to start in it."""
    asked = {"1": "v2", "true": "v2", "0": "v1", "false": "v1"}
    return asked.get(os.environ.get(RUNNER_VARIABLE, "").strip().lower())


def _platform(facts: EngineFacts, version: str | None, root: Path | None) -> str | None:
    """Builds for CPUs say so in their version or by the name of their distribution."""
    parsed = parse_version(version or "")
    if parsed is not None and parsed.local == "cpu":
        return "cpu"
    wheels = [name for name in facts.distributions if name.endswith("-cpu") and _version_of(name)] if root else []
    return "cpu" if wheels else None


def _package(facts: EngineFacts) -> Path | None:
    """The folder of the installed engine, which is not imported."""
    found = find_spec(facts.engine)
    places = list(found.submodule_search_locations or ()) if found else []
    return Path(places[0]) if places and installed_version(facts) else None


def _elsewhere(facts: EngineFacts, launch: Launch) -> Server:
    """The server of an engine that is not installed here: the CPU build of vLLM goes by another name."""
    return next(one for one in facts.servers if one.needs is None or launch.platform != "cpu")


def _variables(facts: EngineFacts, launch: Launch) -> list[str]:
    """The beginning of a command line that needs something in its environment."""
    found = dict(facts.variables.get(launch.platform or "", {}))
    found |= {} if launch.runner is None else {RUNNER_VARIABLE: str(int(launch.runner == "v2"))}
    return ["env", *(f"{name}={value}" for name, value in found.items())] if found else []


def _unset(facts: EngineFacts, launch: Launch) -> list[Finding]:
    """What an engine that is about to start here would look for in its environment, and end without."""
    wanted = facts.variables.get(launch.platform or "", {}) if launch.root else {}
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    mend = f"export {' '.join(f'{name}={value}' for name, value in missing.items())}"
    message = (
        f"is not set in the environment, without which {facts.title} may end while it loads on a {launch.platform}"
    )
    return [Finding.error("environment", name, None, message, mend) for name in missing]


def _pair_flags(
    facts: EngineFacts, pair: tuple[Model, Model], k: int | None, more: Mapping[str, Any] | None = None
) -> list[str]:
    """The target, after the server's own arguments; the drafter, and K unless it is None; revisions that are pinned.

    ``more`` goes into vLLM's speculative config.
    """
    target, draft = pair
    revision = [] if target.revision is None else ["--revision", target.revision]
    if facts.engine == "vllm":
        speculation = {"method": "dflash", "model": draft.name, facts.tokens_flag: k, "revision": draft.revision}
        said = {name: value for name, value in speculation.items() if value is not None} | dict(more or {})
        return [target.name, *revision, "--speculative-config", json.dumps(said)]
    found = [target.name, *revision, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft.name]
    found += [] if draft.revision is None else ["--speculative-draft-model-revision", draft.revision]
    return found if k is None else [*found, spelled(facts.tokens_flag), str(facts.tokens(k))]


def replace_process(launch: Sequence[str]) -> None:
    """Become the engine's server. Returns never."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(launch[0], list(launch))  # noqa: S606 - the command line is ours


def stay_beside(report: ServeReport, floor: float | None = None) -> int:
    """Run the planned server as a child, probe it once ready, and return its exit code (``parent.run_beside``)."""
    from dflash_plugins.parent import run_beside
    from dflash_plugins.probe import probing

    sys.stdout.flush()
    sys.stderr.flush()
    return run_beside(report.launch, probing(report, dict(flags_of(report.launch)), _say, floor))


def _say(text: str, warning: bool) -> None:
    """As one piece: the server's own lines come from other processes."""
    rule = "!" * 100
    loud = f"\n{rule}\nWARNING of dflash-plugins serve --probe: {text}\n{rule}\n"
    print(loud if warning else f"dflash-plugins serve --probe: {text}", file=sys.stderr, flush=True)


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


def flags_of(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name with underscores, value) of ``--name value``, ``--name=value`` and ``--name``."""
    for one, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        name, separator, value = one.lstrip("-").partition("=")
        if one.startswith("-") and name[:1].isalpha():
            yield name.replace("-", "_"), value if separator else None if following.startswith("--") else following


def _refuse_decided(facts: EngineFacts, server: Server, given: Iterable[str], port: int | None) -> None:
    """Also shortened flags, and parts of one (``--speculative-config.model``)."""
    if dropped := sorted(set(server.lacks) & set(given)):
        raise BadInput(f"{server.module} serves here, which has no {', '.join(map(spelled, dropped))}")
    decided = {*facts.decided_flags, *(() if port is None else ("port",))}
    taken = [name for name in given if any(one.startswith(name.partition(".")[0]) for one in decided)]
    if taken:
        listed = ", ".join(map(spelled, sorted(taken)))
        raise BadInput(f"engine flags that serve decides, use --target, --draft, --k and --port: {listed}")


def _k_of(facts: EngineFacts, given: Mapping[str, Any]) -> int | None:
    """K by the engine's own flags, None where they do not say; ``BadInput`` where they are no such number."""
    found = {}
    for name in {facts.tokens_flag, f"{SPECULATION}{facts.tokens_flag}", *facts.tokens_aliases} & given.keys():
        value = str(given[name])
        if not value.isdecimal() or int(value) <= facts.tokens_beyond_k:
            raise BadInput(f"{spelled(name)} {value}: expected a number from {facts.tokens_beyond_k + 1} on")
        found[name] = int(value) - facts.tokens_beyond_k
    if len({*found.values()}) > 1:
        raise BadInput(f"{' and '.join(map(spelled, sorted(found)))} disagree: give one of them")
    return next(iter(found.values()), None)
