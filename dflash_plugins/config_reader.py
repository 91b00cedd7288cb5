"""One pass over a raw drafter configuration: values by key wherever they stand, their origins, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_plugins.config_places import PLACES, Entry, collect
from dflash_plugins.findings import Finding, Severity


@dataclass(frozen=True)
class Kind:
    """What a value has to be, in words and as a test."""

    name: str
    accepts: Callable[[Any], bool]


def is_int(value: Any) -> bool:
    """Whether JSON gave an integer of at most 64 bits: not true or false, and nothing that no engine could hold."""
    return type(value) is int and -(2**63) <= value < 2**63


INT = Kind("an integer", is_int)
SIZE = Kind("a positive integer", lambda v: is_int(v) and v > 0)
NUMBER = Kind("a finite number", lambda v: is_int(v) or (isinstance(v, float) and math.isfinite(v)))
BOOL = Kind("true or false", lambda v: isinstance(v, bool))
STR = Kind("a string", lambda v: isinstance(v, str))
COUNT = Kind("an integer from 1 to 1024", lambda v: is_int(v) and 0 < v <= 1024)
INTS = Kind("a list of integers", lambda v: isinstance(v, list) and bool(v) and all(map(is_int, v)))
STRS = Kind("a list of strings", lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v))
MAP = Kind("an object", lambda v: isinstance(v, dict))

# A documented order exists for these; for every other key two places that differ are refused.
_ORDERED = frozenset({"dtype", "final_logit_softcapping", "input_embedding_scale", "output_multiplier"})


class Reader:
    """One pass over one raw configuration; collects facts, where they came from, and findings."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.entries = collect(raw)
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.said: set[str] = set()

    def error(self, code: str, key: str, value: Any, message: str, mend: str) -> None:
        """An error at ``key``."""
        self.findings.append(Finding.error(code, key, value, message, mend))

    def warn(self, code: str, key: str, value: Any, message: str, mend: str) -> None:
        """A warning at ``key``."""
        self.findings.append(Finding.of(Severity.WARNING, code, key, value, message, mend))

    def present(self, key: str) -> tuple[Entry, ...]:
        """Every place of ``key`` that holds more than null, first precedence first."""
        return tuple(e for e in self.entries.get(key, ()) if e.value is not None)

    def path(self, key: str) -> str:
        """Where the key stands, or where it belongs."""
        entries = self.present(key) or self.entries.get(key, ())
        return entries[0].path if entries else PLACES[key][0][0]

    def take(self, key: str, kind: Kind, *, field: str | None = None) -> Any:
        """First value that is not null, or None; differing places and wrong types become findings."""
        entries = self.present(key)
        if not entries:
            return None
        self._compare(key, entries)
        first = entries[0]
        if not kind.accepts(first.value):
            self.error("config-type", first.path, first.value, f"is not {kind.name}", f"give {kind.name}")
            return None
        self.origins[field or key] = first.path
        return first.value

    def _compare(self, key: str, entries: tuple[Entry, ...]) -> None:
        first = entries[0]
        for other in entries[1:]:
            if other.value == first.value:
                continue
            both = {first.path: first.value, other.path: other.value}
            places = f"{first.path} and {other.path}"
            if key in _ORDERED:
                self.warn("config-conflict", places, both, f"the two differ; {first.path} is used", "keep one of them")
            else:
                self.error(
                    "config-conflict",
                    places,
                    both,
                    "the two differ and engines disagree about which one wins",
                    "keep the one the drafter was trained with",
                )

    def put(self, field: str, value: Any) -> None:
        """Keep a fact, unless it is None."""
        if value is not None:
            self.facts[field] = value

    def unsupported(self, key: str, value: Any, what: str) -> None:
        """An error for something that neither the core nor the plugin computes."""
        self.error(
            "config-unsupported",
            self.path(key),
            value,
            f"asks for {what}, which we do not compute",
            "serve this drafter with an engine that does, without our plugin",
        )
