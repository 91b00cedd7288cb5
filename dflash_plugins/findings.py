"""What a check has to say: a code, the offending key and value, and the mend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, field_validator


class Severity(StrEnum):
    """``error`` refuses, ``warning`` warns once, ``info`` only informs."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Finding(BaseModel):
    """One reason, complete by itself: what was found where, and what to do about it."""

    model_config = ConfigDict(frozen=True)

    code: str
    severity: Severity
    key: str
    value: Any
    message: str
    mend: str

    @field_validator("key", "value", "message", "mend", mode="before")
    @classmethod
    def _can_be_printed(cls, value: Any) -> Any:
        return printable(value)

    @classmethod
    def of(cls, severity: Severity, code: str, key: str, value: Any, message: str, mend: str) -> Self:
        """With the fields in the order in which they are read."""
        return cls(code=code, severity=severity, key=key, value=value, message=message, mend=mend)

    @classmethod
    def error(cls, code: str, key: str, value: Any, message: str, mend: str) -> Self:
        """One that refuses."""
        return cls.of(Severity.ERROR, code, key, value, message, mend)

    def __str__(self) -> str:
        return f"[{self.code}] {self.key} = {self.value!r}: {self.message} -> {self.mend}"


def printable(value: Any) -> Any:
    """The same, as UTF-8 and JSON can say it: lone surrogates and numbers that are not finite become words."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable(inner) for key, inner in value.items()}
    return [printable(inner) for inner in value] if isinstance(value, list | tuple) else value


def errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Only the findings that refuse."""
    return tuple(f for f in findings if f.severity is Severity.ERROR)
