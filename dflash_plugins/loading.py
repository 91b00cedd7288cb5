"""What an engine's loader is held to: every tensor accounted for, every parameter written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from dflash_plugins.checkpoint import Header
from dflash_plugins.errors import Refused
from dflash_plugins.findings import Finding

_MARKED = (torch.float32, torch.float16, torch.bfloat16)
_STORED = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def header_of(tensors: Mapping[str, torch.Tensor]) -> Header:
    """What a safetensors header would say of ``tensors``: stored name to dtype and shape."""
    return {name: (_STORED.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in tensors.items()}


def mark_unwritten(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Fill floating parameters with NaN, so that what the loader leaves out can be told from what it wrote."""
    for _, parameter in parameters:
        if parameter.dtype in _MARKED:
            parameter.data.fill_(torch.nan)


def refuse_unwritten(parameters: Iterable[tuple[str, torch.nn.Parameter]], shared: Iterable[str]) -> None:
    """Refuse parameters that still hold NaN after loading, except ``shared`` ones, which the target provides."""
    shared = set(shared)
    found = [
        Finding.error(
            "parameter-unwritten",
            name,
            list(parameter.shape),
            "holds NaN after loading: the loader did not write it, or the checkpoint holds NaN",
            "export the drafter again in the released layout",
        )
        for name, parameter in parameters
        if name not in shared and parameter.dtype in _MARKED and bool(torch.isnan(parameter.data).any())
    ]
    if found:
        raise Refused("the loaded drafter", found)
