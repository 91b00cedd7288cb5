"""Stand-in for triton.runtime; ``jit`` holds what is real of it."""

from sglang_cpu_stubs import placeholders

__getattr__ = placeholders("triton.runtime")
