"""Stand-in for Triton: kernels can be defined, not launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_cpu_stubs import placeholders, with_any_submodule

from triton.runtime.jit import JITFunction

__version__ = "0.0.0+stub"

with_any_submodule("triton")
__getattr__ = placeholders("triton")


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The decorator, with or without options."""
    return JITFunction if function is None else JITFunction(function)


def _unchanged(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


autotune = heuristics = _unchanged


class Config:
    """One configuration of an autotuner; kept, never used."""

    def __init__(self, kwargs: Any, **options: Any) -> None:
        self.kwargs, self.options = kwargs, options


def cdiv(numerator: int, denominator: int) -> int:
    """Quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()
