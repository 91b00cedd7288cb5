"""What ``check`` and ``serve`` answer: every finding, what the drafter is, what was tested, and the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_plugins.config_models import DraftConfig
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.matrix import MatrixRow, Status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SHORTEST_SCREEN = 24
_LONGEST_VALUE = 60
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class DraftSummary(_Frozen):
    """The drafter as it was trained; ``k`` proposals are B - 1, ``causal`` has a flag per layer."""

    method: str
    block_size: int
    k: int
    target_layer_ids: tuple[int, ...]
    causal: tuple[bool, ...]
    dtype: str | None
    fingerprint: str

    @classmethod
    def of(cls, config: DraftConfig, dtype: str | None) -> DraftSummary:
        """Of a description; ``dtype`` is that of the stored tensors."""
        names = ("method", "block_size", "k", "target_layer_ids", "causal", "fingerprint")
        return cls(dtype=dtype, **{name: getattr(config, name) for name in names})


class MatrixSummary(_Frozen):
    """What the compatibility matrix says of the pair on this engine version; for people, the same in words."""

    status: Status
    statement: str = Field(default="", exclude=True)
    rows: tuple[MatrixRow, ...] = ()


class EngineSummary(_Frozen):
    """The engine that the plan is for: its version, and whether it was given or found installed here."""

    name: str
    version: str | None
    version_from: Literal["given", "installed"] | None
    platform: str | None
    runner: str | None


class CheckReport(_Frozen):
    """All about a pair and its planned launch; ``launch`` is empty where it is refused.

    ``verdict``: ``refused`` for errors; ``engine-alone`` where neither core nor plugin computes the drafter and the
    engine serves it by itself; else ``ok``.
    """

    target: str
    draft_name: str
    engine: EngineSummary
    verdict: Literal["ok", "engine-alone", "refused"]
    findings: tuple[Finding, ...]
    draft: DraftSummary | None
    matrix: MatrixSummary
    launch: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 when an error was found, else 0."""
        return 1 if self.verdict == "refused" else 0

    def render(self, console: Console) -> None:
        """One screen: the verdict, findings that mean the same as one, and the command line."""
        head, foot = self._head(), self._foot()
        room = max(console.height, _SHORTEST_SCREEN) - 2 - _height(console, [*head, *foot])
        shown: list[Text] = []
        groups = list(_groups(self.findings))
        while groups and (block := groups[0].text()) and room - _height(console, [block]) >= (len(groups) > 1):
            room -= _height(console, [block])
            shown.append(block)
            groups.pop(0)
        for line in [*head, *shown]:
            console.print(line, soft_wrap=False)
        if groups:
            names = ", ".join(dict.fromkeys(group.code for group in groups))
            console.print(_line("dim", f"and more, see --json: {names}"))
        for line in foot:
            console.print(line, soft_wrap=True)

    def _head(self) -> list[Text]:
        version = self.engine.version or "of unknown version"
        runner = f", runner {self.engine.runner}" if self.engine.runner else ""
        lines = [_line("bold", f"{self.draft_name} for {self.target} on {self.engine.name} {version}{runner}")]
        if self.draft is not None:
            known_bad = self.matrix.status == "known-bad"  # why, an error says
            said = self.matrix.status if known_bad else self.matrix.statement
            facts = f"{self.draft.method}, block {self.draft.block_size}, so K {self.draft.k}"
            lines.append(_line("", f"{facts}, {self.draft.dtype}; matrix: {said}"))
        return lines

    def _foot(self) -> list[Text]:
        count = {severity: sum(f.severity is severity for f in self.findings) for severity in Severity}
        said = ", ".join(f"{n} {severity}{'s' * (n != 1)}" for severity, n in count.items() if n) or "nothing to report"
        if self.verdict == "refused":
            return [_line("bold red", f"refused: {said}")]
        style, words = ("yellow", "served by the engine alone") if self.verdict == "engine-alone" else ("green", "ok")
        return [_line(style, f"{words}: {said}"), _line("", shlex.join(self.launch))]


class ServeReport(CheckReport):
    """The same before a server starts: in full, one finding per line, the command line last; ``k``: as served."""

    k: int | None = None

    def render(self, console: Console) -> None:
        """Errors and warnings, one per line, then the command line."""
        shown = [one for one in self.findings if one.severity is not Severity.INFO]
        for one in shown:
            console.print(f"{one.severity}: {one}", markup=False, highlight=False, soft_wrap=True)
        count = sum(one.severity is Severity.ERROR for one in shown)
        last = shlex.join(self.launch) if self.launch else f"refused: {count} errors"
        console.print(last, markup=False, highlight=False, soft_wrap=True)


class _Group:
    """Findings of one code and mend: the first in full, of the others the keys."""

    def __init__(self, first: Finding) -> None:
        self.first, self.code = first, first.code
        self.keys = [first.key]

    def text(self) -> Text:
        """Key, value and message; what to do, for an information on the same line."""
        first = self.first
        value = "" if first.value is None or len(_words(first.value)) > _LONGEST_VALUE else f" = {_words(first.value)}"
        others = f" (and {len(self.keys) - 1} more: {', '.join(self.keys[1:3])} ...)" if len(self.keys) > 1 else ""
        said = f"{first.key}{value}: {first.message}{others}"
        text = _line(_STYLES[first.severity], f"{first.severity} [{self.code}] ")
        quiet = first.severity is Severity.INFO
        return text.append(
            f"{said}{' ' if quiet else chr(10) + '  '}-> {first.mend}", style="dim" if quiet else "default"
        )


def _groups(findings: Iterable[Finding]) -> Iterator[_Group]:
    groups: dict[tuple[Any, ...], _Group] = {}
    for one in findings:
        group = groups.setdefault((one.severity, one.code, one.mend), _Group(one))
        if group.first is not one:
            group.keys.append(one.key)
    return iter(groups.values())


def _line(style: str, words: str) -> Text:
    from rich.text import Text

    return Text(words, style=style)


def _height(console: Console, lines: list[Text]) -> int:
    return sum(len(console.render_lines(line, pad=False)) for line in lines)


def _words(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
