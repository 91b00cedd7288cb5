"""Flags of a planned launch: which of them rules know, in the kind the engine takes, and as a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal

import yaml

from dflash_plugins.engines import EngineFacts, known_flags
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.rules import Setting

SPECULATION = "speculative_config."
UNREAD = "unread:"
"""Before the names of flags that no rule reads, which could be canonical names of other engines."""

_FACTORS = {"k": 1e3, "K": 2**10, "m": 1e6, "M": 2**20, "g": 1e9, "G": 2**30}
_SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_KINDS = {"integer": "a whole number", "number": "a number", "switch": "true or false", "text": "a word"}


def flag_value(text: str) -> Any:
    """Of a flag or of ``--set KEY=VALUE``, as YAML reads it, or the text where it is no YAML."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def read_settings(engine: EngineFacts, given: Mapping[str, Any]) -> tuple[dict[str, Setting], list[Finding]]:
    """Settings by canonical name, and what is wrong with ``given`` (names with underscores to values).

    A value None stands for a flag without one. What no rule reads is kept (``UNREAD``); unknown flags are reported.
    """
    canonical = {name: flag for flag, entry in engine.flags.items() for name in entry.names}
    found: dict[str, Setting] = {}
    wrong: list[Finding] = []
    for key, value in given.items():
        name, value = _positive(engine, key, value)
        flag = canonical.get(name)
        if flag is None:
            wrong += _unknown(engine, key, name, value, canonical)
            found[UNREAD + name] = Setting(key, value)
            continue
        kind = engine.flags[flag].kind
        fits, converted = _converted(kind, value)
        if not fits:
            message, mend = f"is not {_KINDS[kind]}", f"give {key} as {_KINDS[kind]}"
            wrong.append(Finding.error("setting-type", key, value, message, mend))
        elif flag in found and found[flag].value != converted:
            both = {found[flag].key: found[flag].value, key: converted}
            message, mend = "say the same flag with different values", "give one of the two"
            wrong.append(Finding.error("setting-twice", f"{found[flag].key} and {key}", both, message, mend))
        elif converted is not None:
            found[flag] = Setting(key, converted)
    return found, wrong


def _positive(engine: EngineFacts, key: str, value: Any) -> tuple[str, Any]:
    """``no_enable_x`` as ``enable_x`` false, where the engine negates its switches so."""
    negated = engine.negated_flags and key.startswith("no_") and value in (None, True)
    return (key.removeprefix("no_"), False) if negated else (key, value)


def _unknown(engine: EngineFacts, key: str, name: str, value: Any, canonical: Iterable[str]) -> Iterator[Finding]:
    flags = known_flags(engine.engine)
    if name in flags or name.partition(".")[0] in flags:
        return
    near = get_close_matches(name, {*flags, *canonical}, n=2)
    mend = f"did you mean {' or '.join(near)}?" if near else "check the spelling"
    message = f"is no flag of {engine.title} that we know, and no rule reads it"
    yield Finding.of(Severity.WARNING, "setting-unknown", key, value, message, mend)


def _converted(kind: Literal["integer", "number", "switch", "text", "any"], value: Any) -> tuple[bool, Any]:
    """Whether a value is of its kind, and the value; "auto" and the like leave a number to the engine: None."""
    if kind == "switch":
        found = True if value is None else _SWITCHES.get(str(value).lower())
        return found is not None, found
    if kind == "any" or value is None:
        return True, value
    if kind == "text" or isinstance(value, bool):
        return kind == "text" and isinstance(value, str), value
    if isinstance(value, str) and value.lower() in ("auto", "none", "null"):
        return True, None
    number = _number(value)
    fits = number is not None and (kind == "number" or number == int(number))
    return fits, int(number) if fits and kind == "integer" and number is not None else number


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return value if abs(value) < 2**63 else None
    match = re.fullmatch(r"(-?\d{1,18}(?:\.\d{1,9})?)([kKmMgG]?)", str(value))
    return None if match is None else float(match[1]) * _FACTORS.get(match[2], 1)


def command_flags(engine: EngineFacts, settings: Mapping[str, Setting]) -> tuple[list[str], dict[str, Any]]:
    """The settings as arguments of the engine's server, and those of them that belong into its speculative config.

    What only a plan says, and the flags that say K, are left out.
    """
    arguments: list[str] = []
    speculation: dict[str, Any] = {}
    for flag, (key, value) in settings.items():
        entry = engine.flags.get(flag)
        name = entry.names[0] if entry else flag.removeprefix(UNREAD)
        if entry and (entry.planning or flag == "tokens"):
            continue
        if name.startswith(SPECULATION):
            speculation[name.removeprefix(SPECULATION)] = value
        elif isinstance(value, bool):
            arguments += [spelled(name)] if value else [spelled(f"no_{name}")] if engine.negated_flags else []
        else:
            arguments += [spelled(name if entry else key), *_argument(value)]
    return arguments, speculation


def _argument(value: Any) -> list[str]:
    if value is None:
        return []
    return [value if isinstance(value, str) else json.dumps(value)]


def spelled(name: str) -> str:
    """A flag as it is typed."""
    return "--" + name.replace("_", "-")
