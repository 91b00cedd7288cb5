"""What the three stand-ins share: names that can be imported, and that say what they are when they are used.

SGLang imports ``sgl_kernel``, ``torchvision`` and ``triton`` wherever it runs, also where no line of them is needed.
None has a build for CPUs on the package registry. The packages beside this one hold what serving a text model on a CPU
really calls, and for everything else a placeholder: importing it is fine, using it raises ``StandInUsed``.
"""

from __future__ import annotations

import functools
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class StandInUsed(RuntimeError):
    """Something was called that only the real package has."""

    def __init__(self, name: str) -> None:
        package = name.partition(".")[0]
        super().__init__(
            f"{name} was used, but {package} is a stand-in here, which holds only what text models on a CPU need "
            f"(distribution dflash-plugins-sglang-cpu-stubs); install the real {package} to go this way"
        )


class Placeholder:
    """A name of the real package: may be imported, passed on and used as an annotation, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)
        return Placeholder(f"{self._name}.{attribute}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise StandInUsed(self._name)

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"


class _Missing(type):
    """The type of classes that only the real package has: good for annotations, ``isinstance`` and as a base."""

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return Placeholder(f"{cls.__module__}.{cls.__name__}.{attribute}")

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        raise StandInUsed(f"{cls.__module__}.{cls.__name__}")


@functools.cache
def _class(module: str, name: str) -> type:
    return _Missing(name, (), {"__module__": module})


class _Submodules(MetaPathFinder, Loader):
    """Any submodule of a stand-in can be imported; it holds placeholders only."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        inside = fullname.startswith(self._package + ".")
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = placeholders(module.__name__)


def placeholders(module: str) -> Any:
    """``__getattr__`` for a module: a class for every capitalised name it does not define, else a placeholder."""

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's own
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _class(module, name) if name[:1].isupper() else Placeholder(f"{module}.{name}")

    return __getattr__


def with_any_submodule(package: str) -> None:
    """Let every submodule of ``package`` that is not there be imported. Asked last, after files that exist."""
    if not any(isinstance(one, _Submodules) and one._package == package for one in sys.meta_path):
        sys.meta_path.append(_Submodules(package))
