"""What an adapter relies on in its engine, as rows of a table; and the book of everything it has replaced there.

A table is checked before anything is changed, so a release that moved something is met with sentences, not with a
crash in the middle of a request. Nothing here imports an engine by itself: a row names a module, and ``drift`` imports
it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dflash_plugins.errors import DFlashPluginsError
from dflash_plugins.switches import DISABLE


class Use(StrEnum):
    """What we do with an attribute of the engine."""

    CALLED = "called"
    READ = "read"
    OVERRIDDEN = "overridden"
    REPLACED = "replaced"


@dataclass(frozen=True)
class Hook:
    """One attribute of the engine that the adapter relies on.

    ``attribute`` is dotted inside ``module``. ``parameters`` are the names a callable must accept, in this order, where
    we call it by position or stand in for it; ``reads`` are names its code must use, where we set or read them for it.
    """

    module: str
    attribute: str
    use: Use
    purpose: str
    parameters: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


def resolve(hook: Hook) -> Any:
    """The live attribute; AttributeError or ImportError where it is gone."""
    value: Any = importlib.import_module(hook.module)
    for part in hook.attribute.split("."):
        value = getattr(value, part)
    return value


def _names_used(function: Any) -> set[str]:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_varnames}


def drift_of(hook: Hook) -> str | None:
    """One sentence where the engine is not as the row says, or None."""
    wanted = f"it is {hook.use} {hook.purpose}"
    try:
        value = resolve(hook)
    except (ImportError, AttributeError) as error:
        return f"{hook.name} is gone ({error}); {wanted}"
    if hook.parameters:
        found = tuple(inspect.signature(value).parameters)
        if found[: len(hook.parameters)] != hook.parameters:
            return f"{hook.name} takes {found} instead of {hook.parameters}; {wanted}"
    missing = [name for name in hook.reads if name not in _names_used(value)]
    if missing:
        return f"{hook.name} no longer uses {', '.join(missing)}; {wanted}"
    return None


def drift(hooks: Iterable[Hook]) -> list[str]:
    """A sentence for every row that no longer holds, in table order."""
    return [sentence for hook in hooks if (sentence := drift_of(hook)) is not None]


def refuse_drift(engine: str, hooks: Iterable[Hook]) -> None:
    """DFlashPluginsError with a sentence for every row that no longer holds."""
    sentences = drift(hooks)
    if sentences:
        lines = "\n".join(f"  {sentence}" for sentence in sentences)
        known = f"{engine} is not as dflash-plugins knows it ({DISABLE}=1 serves without it)"
        raise DFlashPluginsError(f"{known}:\n{lines}")


class AlreadyPatchedError(DFlashPluginsError):
    """The same place was to be replaced a second time."""


@dataclass(frozen=True)
class _Patch:
    place: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    before: Any
    after: Any


@dataclass
class Patches:
    """Everything replaced in the engine, in order, with the way back."""

    done: list[_Patch] = field(default_factory=list)

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(patch.place for patch in self.done)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; AlreadyPatchedError if this book has replaced it before."""
        place = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        self._patch(place, lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)

    def item(self, label: str, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Replace ``mapping[key]``, which must exist; AlreadyPatchedError as above."""
        self._patch(f"{label}[{key!r}]", lambda: mapping[key], lambda new: mapping.__setitem__(key, new), value)

    def added(self, label: str, mapping: MutableMapping[str, Any], key: str) -> None:
        """Remember ``mapping[key]`` as ours, which was not there before."""
        self.done.append(
            _Patch(f"{label}[{key!r}]", lambda: mapping.get(key), lambda _: mapping.pop(key, None), None, mapping[key])
        )

    def _patch(self, place: str, get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> None:
        if place in self.places:
            raise AlreadyPatchedError(f"{place} has been replaced already; undo() first")
        before = get()
        put(value)
        self.done.append(_Patch(place, get, put, before, value))

    def undo(self) -> list[str]:
        """Put everything back, last first. A place somebody else replaced since is left alone and named."""
        left: list[str] = []
        while self.done:
            patch = self.done.pop()
            if patch.get() is patch.after:
                patch.put(patch.before)
            else:
                left.append(f"{patch.place} was replaced again by somebody else and is left as it is")
        return left
