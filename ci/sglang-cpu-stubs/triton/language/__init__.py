"""Stand-in for triton.language: constants can be declared; nothing can be computed."""

from __future__ import annotations

from typing import Any

from sglang_cpu_stubs import placeholders

__getattr__ = placeholders("triton.language")


class constexpr:  # noqa: N801 - the name in the real package
    """A constant of a kernel; torch declares some when it is imported."""

    def __init__(self, value: Any) -> None:
        self.value = value
