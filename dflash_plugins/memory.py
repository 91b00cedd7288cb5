"""Rules on memory: what the drafter's weights and its part of the KV cache take."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_plugins.findings import Severity
from dflash_plugins.pair import dtype_name
from dflash_plugins.rules import Facts, Hit, Rule

GIB = 2**30
LARGE_SHARE = 0.2
# Of the KV cache, per element; scales of blocks come on top and are small.
_BITS = (
    ("float32", 32),
    ("float16", 16),
    ("bfloat16", 16),
    ("fp8", 8),
    ("int8", 8),
    ("nvfp4", 4),
    ("int4", 4),
    ("fp4", 4),
)


def _kv_bits(f: Facts, *names: str) -> int | None:
    """Bits of a KV element by the first flag that is set, else of the served dtype; None where that is not known."""
    asked = next((str(value) for name in names if (value := f.setting(name)) not in (None, "auto")), None)
    served = f.served_dtype if f.served_dtype not in (None, "auto") else f.target.dtype if f.target else None
    name = (dtype_name(asked or served or f.dtype) or "").lower()
    return next((bits for start, bits in _BITS if name.startswith(start)), None)


def _heads_of_rank(kv_heads: int, ranks: int) -> int:
    """Whole heads; where there are more ranks than heads, each holds a copy of one."""
    return max(kv_heads // ranks, 1)


def draft_kv_bytes(f: Facts) -> int | None:
    """Bytes of the drafter's KV cache per token and rank: layers, K and V, heads of one rank, head_dim."""
    layers, heads, width = (f.draft.get(name) for name in ("num_layers", "num_kv_heads", "head_dim"))
    bits = _kv_bits(f, "draft_kv_cache_dtype", "kv_cache_dtype")
    ranks = f.setting("draft_tensor_parallel_size") or f.setting("tensor_parallel_size") or 1
    if layers is None or heads is None or width is None or bits is None or ranks < 1:
        return None
    return int(layers) * 2 * _heads_of_rank(heads, ranks) * int(width) * bits // 8


def target_kv_bytes(f: Facts) -> int | None:
    """The same of the target, whose latent caches are not split."""
    target, bits = f.target, _kv_bits(f, "kv_cache_dtype")
    ranks = f.setting("tensor_parallel_size") or 1
    if target is None or bits is None or ranks < 1 or not target.kv_width or target.num_kv_layers is None:
        return None
    heads = target.num_kv_heads
    split = heads is not None and heads > 0 and target.kv_width % heads == 0
    width = target.kv_width // heads * _heads_of_rank(heads, ranks) if split and heads else target.kv_width
    return target.num_kv_layers * width * bits // 8


def _draft_kv(f: Facts) -> Iterator[Hit]:
    if f.engine and (size := draft_kv_bytes(f)):
        target, ranks = target_kv_bytes(f), f.setting("tensor_parallel_size") or 1
        beside = f", beside {target:,} of the target" if target else ""
        yield Hit("kv_cache", size, {"size": f"{size:,}", "beside": beside, "rank": " and rank" if ranks > 1 else ""})


def _draft_kv_share(f: Facts) -> Iterator[Hit]:
    draft, target = draft_kv_bytes(f), target_kv_bytes(f)
    if f.engine and draft and target and draft / (draft + target) > LARGE_SHARE:
        share = draft / (draft + target)
        yield Hit("kv_cache", draft, {"share": f"{share:.0%}", "size": f"{draft:,}", "all": f"{draft + target:,}"})


def _draft_memory(f: Facts) -> Iterator[Hit]:
    free, own = f.launch.free_gib, f.draft_bytes
    ranks = f.setting("draft_tensor_parallel_size") or f.setting("tensor_parallel_size") or 1
    if free is not None and own is not None and ranks >= 1 and own / ranks > free * GIB:
        yield Hit("free_gib", free, {"draft": f"{own / ranks / GIB:.2f}", "free": f"{free:g}"})


def _weights(f: Facts) -> Iterator[Hit]:
    """Both models against what the engine may use of a device, or against what is free on it."""
    ranks = (f.setting("tensor_parallel_size") or 1) * (f.setting("pipeline_parallel_size") or 1)
    if f.draft_bytes is None or f.target_bytes is None or ranks < 1 or next(_draft_memory(f), None):
        return
    share, memory, free = f.setting("gpu_memory_utilization") or 1.0, f.launch.memory_gib, f.launch.free_gib
    limits = [limit for limit in (None if memory is None else memory * share, free) if limit is not None]
    needed = (f.draft_bytes + f.target_bytes) / ranks / GIB
    if limits and needed > min(limits):
        key = "memory_gib" if memory is not None and min(limits) == memory * share else "free_gib"
        words = {"needed": f"{needed:.2f}", "limit": f"{min(limits):.2f}"}
        yield Hit(key, memory if key == "memory_gib" else free, words)


MEMORY = (
    Rule(
        "draft-memory", Severity.ERROR, _draft_memory,
        "the draft does not fit: its weights take {draft} GiB per rank, {free} GiB are free",
        "free memory, lower what the engine takes for itself, or serve without a drafter",
    ),
    Rule(
        "weights-memory", Severity.ERROR, _weights,
        "target and drafter take {needed} GiB per rank before any KV cache, and {limit} GiB may be used",
        "use more ranks, a smaller or quantised target, or serve without a drafter",
    ),
    Rule(
        "draft-kv-share", Severity.WARNING, _draft_kv_share,
        "the drafter takes {share} of the KV cache: {size} of {all} bytes per token",
        "expect fewer requests at once than without a drafter",
    ),
    Rule(
        "draft-kv", Severity.INFO, _draft_kv,
        "the drafter's KV cache takes {size} bytes per token{rank}{beside}", "nothing to mend: plan memory with it",
    ),
)  # fmt: skip
