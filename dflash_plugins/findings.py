"""What a check has to say: a code, the offending key and value, and the mend."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


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


def errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Only the findings that refuse."""
    return tuple(f for f in findings if f.severity is Severity.ERROR)
