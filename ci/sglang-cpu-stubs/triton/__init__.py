"""Stand-in for Triton: kernels can be defined, not launched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_cpu_stubs import StandInUsed, placeholders, with_any_submodule

__version__ = "0.0.0+stub"

with_any_submodule("triton")
__getattr__ = placeholders("triton")


class _Kernel:
    """A decorated kernel. Launching or calling it raises."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.fn = function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise StandInUsed(f"triton kernel {self.fn.__module__}.{self.fn.__qualname__}")


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The decorator, with or without options."""
    return _Kernel if function is None else _Kernel(function)


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
