"""Stand-in for sgl_kernel: the three functions that SGLang calls on a CPU for a text model, in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from sglang_cpu_stubs import placeholders, with_any_submodule

__version__ = "0.0.0+stub"

with_any_submodule("sgl_kernel")
__getattr__ = placeholders("sgl_kernel")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write ``out_cache_loc``, request after request, to columns start..end - 1 of each request's row."""
    for columns, slots in _by_request(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc):
        columns.copy_(slots)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read columns start..end - 1 of each request's row into ``out_cache_loc``, request after request."""
    for columns, slots in _by_request(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc):
        slots.copy_(columns)


def _by_request(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views, request after request: columns start..end - 1 of its row of ``table``, and as many of ``slots``."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield table[row, start:end], slots[taken : taken + end - start]
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """In every buffer (address, bytes per slot), copy the slots ``src_loc`` to ``tgt_loc`` as if all at once."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(address + source * size, size) for source in sources]
        for target, content in zip(targets, slots, strict=True):
            ctypes.memmove(address + target * size, content, size)
