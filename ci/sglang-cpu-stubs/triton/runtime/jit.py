"""Stand-in for triton.runtime.jit: what a decorated kernel is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_cpu_stubs import StandInUsed, placeholders

__getattr__ = placeholders("triton.runtime.jit")


class JITFunction:
    """A decorated kernel. Launching or calling it raises."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.fn = function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise StandInUsed(f"triton kernel {self.fn.__module__}.{self.fn.__qualname__}")
