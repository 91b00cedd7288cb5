"""What SGLang's DFLASH needs on a CPU, where the engine refuses it. Imported there and nowhere else.

Everything is undone with the plugin's other changes, but for what the engine's own registries keep.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from dflash_plugins.hooks import Patches

BACKEND = "torch_native"


class _Admitting:
    """The engine's platform, saying for the reading of DFLASH's arguments that it can draft."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND


@contextlib.contextmanager
def admitted() -> Iterator[None]:
    """Let the engine read DFLASH's arguments as on a platform that can draft."""
    from sglang.srt.arg_groups import speculative_hook

    shipped = speculative_hook.current_platform
    speculative_hook.current_platform = _Admitting(shipped)
    try:
        yield
    finally:
        speculative_hook.current_platform = shipped


def prepare(patches: Patches) -> None:
    """Make the scheduler's process able to draft, before it builds the drafter."""
    import torch
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import DRAFT_ATTENTION_BACKEND_CHOICES, add_draft_attention_backend_choices

    from sglang_ext.cpu.attention import BlockAttention

    if BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([BACKEND])
    attention_registry.register_attention_backend(BACKEND)(BlockAttention)
    shipped = ModelRunner._extend_forward_kwargs
    patches.attribute(ModelRunner, "_extend_forward_kwargs", _keeping_dtype(shipped))
    patches.attribute(torch.Tensor, "record_stream", _not_on_a_cpu(torch.Tensor.record_stream))


def _not_on_a_cpu(shipped: Any) -> Any:
    """The engine tells the allocator which stream uses a tensor; on a CPU there is none and nobody to tell."""

    @functools.wraps(shipped)
    def record_stream(tensor: Any, stream: Any) -> None:
        if tensor.device.type != "cpu":
            shipped(tensor, stream)

    return record_stream


def _keeping_dtype(shipped: Any) -> Any:
    """The engine makes bf16 of a block's embeddings, whatever the model's dtype."""

    @functools.wraps(shipped)
    def arguments(runner: Any, forward_batch: Any, *more: Any, **options: Any) -> Any:
        found = shipped(runner, forward_batch, *more, **options)
        if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
            found["input_embeds"] = forward_batch.input_embeds
        return found

    return arguments
