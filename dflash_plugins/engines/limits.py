"""Which limits and bugs of an engine's file concern a pair and a planned launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from dflash_plugins.engines import Architecture, Bug, Condition, Limit, Sign, at_least, known_bugs, parse_version
from dflash_plugins.findings import Finding, Severity

if TYPE_CHECKING:
    from dflash_plugins.rules import Facts

Holds = bool | None
"""True, False, or None where only something unknown about the launch could tell."""


def limit_findings(facts: Facts) -> list[Finding]:
    """Everything of the engine's file that concerns ``facts``: first versions, limits, bugs."""
    if facts.engine is None:
        return []
    version = parse_version(facts.launch.version or "")
    found = _unparsed(facts.launch.version) if version is None else []
    found += _architecture_findings(facts, version)
    for limit in facts.engine.limits:
        holds = _holds(limit, facts, version)
        if holds or (holds is None and not (limit.severity is Severity.INFO and "method" not in facts.draft)):
            found.append(_limit_finding(limit, facts, version, certain=holds is True))
    if facts.launch.platform is not None:
        bugs = known_bugs(facts.engine.engine, facts.launch.platform, facts.launch.version)
        found += map(_bug_finding, bugs)
    return found


def _unparsed(version: str | None) -> list[Finding]:
    if version is None:
        return []
    message, mend = "is no version that can be compared", "give a version like 0.31.0"
    return [Finding.of(Severity.WARNING, "engine-version-unknown", "engine_version", version, message, mend)]


def _architecture_findings(facts: Facts, version: Version | None) -> list[Finding]:
    known = facts.engine.architecture(facts.draft.get("architecture")) if facts.engine else None
    if known is None or facts.engine is None:
        return []
    base, title = facts.engine.architecture(known.needs) or known, facts.engine.title
    there = _present(base, facts, version)
    if there is True or (there is None and version is None):
        return _plugin_findings(known, title, facts.launch.version, version)
    severity = Severity.ERROR if there is False else Severity.WARNING
    first = f"from {base.first} on" if base.first else "in no way that its source shows"
    message = f"{title} serves {base.name} {first}" + (f", which {known.name} needs" if known.needs else "")
    if known.needs:
        mend = f"use {title} {' or '.join(known.seen)}, which our plugin has been run with"
    else:
        mend = f"use {title} {base.first or (*base.seen, '?')[0]} or later, or a version our plugin supports"
    return [Finding.of(severity, "engine-too-old", "engine_version", facts.launch.version, message, mend)]


def _plugin_findings(known: Architecture, title: str, said: str | None, version: Version | None) -> list[Finding]:
    """What our plugin adds is built on the engine's inside: only versions that it was run with are sure."""
    if not known.plugin or version is None or version.base_version in known.seen:
        return []
    versions = " and ".join(known.seen)
    message = f"our plugin, which {known.name} needs, has been run with {title} {versions} only"
    mend = (
        f"use {title} {' or '.join(known.seen)}, or prove the pair first; where the plugin lacks something it says so"
    )
    return [Finding.of(Severity.WARNING, "plugin-untested", "engine_version", said, message, mend)]


def _present(known: Architecture, facts: Facts, version: Version | None) -> Holds:
    """What the installed source shows wins over what the version says."""
    shown = _seen(known.sign, facts)
    if shown is not None or known.first is None:
        return True if shown is None else shown
    return None if version is None else at_least(version, known.first)


def _seen(sign: Sign | None, facts: Facts) -> bool | None:
    return None if sign is None else sign.seen(facts.launch.root)


def _holds(limit: Limit, facts: Facts, version: Version | None) -> Holds:
    when = limit.when
    method = facts.draft.get("method")
    if when.methods is not None and (method or when.methods[0]) not in when.methods:
        return False
    named = True if method or when.methods is None else None
    if not facts.traits.issuperset(when.traits):
        return False
    settings = {name: setting.value for name, setting in facts.settings.items()}
    if not (_tests_hold(when.settings, settings) and _tests_hold(when.generation, facts.generation)):
        return False
    return _all([named, _launch_holds(limit, facts), _version_holds(limit, facts, version)])


def _all(parts: Iterable[Holds]) -> Holds:
    parts = list(parts)
    return False if False in parts else None if None in parts else True


def _tests_hold(tests: Mapping[str, Condition], values: Mapping[str, Any]) -> bool:
    return all(holds(test, values.get(name)) for name, test in tests.items())


def holds(test: Condition, value: Any) -> bool:
    """Whether a value, None where there is none, meets every part of a test; a value of another kind does not."""
    if value is None or test.absent:
        return value is None and (test.unset or test.absent)
    number = value if isinstance(value, int | float) else None
    return (
        (test.equal is None or value == test.equal)
        and (test.differs is None or value != test.differs)
        and (test.above is None or (number is not None and number > test.above))
        and (test.below is None or (number is not None and number < test.below))
        and (not test.like or any(fnmatchcase(str(value).lower(), pattern) for pattern in test.like))
    )


def _launch_holds(limit: Limit, facts: Facts) -> Holds:
    """An unknown platform is taken for the usual one, a GPU; an unknown runner for either."""
    if limit.when.platform is not None and limit.when.platform != facts.launch.platform:
        return False
    return None if limit.when.runner and facts.runner is None else limit.when.runner in (None, facts.runner)


def _version_holds(limit: Limit, facts: Facts, version: Version | None) -> Holds:
    shown = _seen(limit.sign, facts)
    if shown is not None or (limit.since is None and limit.fixed is None):
        return True if shown is None else shown
    if version is None:
        return False  # said once, by whoever knows that nobody named a version
    begun = True if limit.since is None else at_least(version, limit.since)
    mended = False if limit.fixed is None else at_least(version, limit.fixed)
    return _all([begun, None if mended is None else not mended])


def _limit_finding(limit: Limit, facts: Facts, version: Version | None, *, certain: bool) -> Finding:
    unsure = Severity.INFO if limit.severity is Severity.INFO else Severity.WARNING
    key, value = _place(limit, facts)
    condition = "" if certain else f" (if {' and '.join(_conditions(limit, facts, version))})"
    message = limit.message + condition
    return Finding.of(limit.severity if certain else unsure, limit.id, key, value, message, limit.mend)


def _conditions(limit: Limit, facts: Facts, version: Version | None) -> Iterable[str]:
    if limit.when.methods and "method" not in facts.draft:
        yield f"the method is {' or '.join(limit.when.methods)}"
    if limit.when.runner and facts.runner is None:
        yield f"the runner is {limit.when.runner}"
    if _version_holds(limit, facts, version) is None:
        bounds = [f"from {limit.since} on"] if limit.since else []
        yield f"the version is one {' and '.join([*bounds, *([f'before {limit.fixed}'] if limit.fixed else [])])}"


def _place(limit: Limit, facts: Facts) -> tuple[str, Any]:
    """The key as the user wrote it, and its value: of a setting, of generation_config, else of the drafter."""
    for name in limit.when.settings:
        if limit.key == name and (setting := facts.settings.get(name)):
            return setting.key, setting.value
    if limit.key.startswith("generation_config."):
        return limit.key, facts.generation.get(limit.key.partition(".")[2])
    if limit.key == "architectures":
        return limit.key, facts.draft.get("architecture")
    return limit.key, facts.draft.get(limit.key)


def _bug_finding(bug: Bug) -> Finding:
    mend = f"{bug.mend} ({bug.switch}=1 switches that off)"
    return Finding.of(Severity.INFO, bug.id, "platform", bug.platform, bug.symptom, mend)
