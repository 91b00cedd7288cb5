"""Stand-in for torchvision: names for annotations and enumerations; every function raises."""

from __future__ import annotations

from sglang_cpu_stubs import placeholders, with_any_submodule

__version__ = "0.0.0+stub"

with_any_submodule("torchvision")
__getattr__ = placeholders("torchvision")
