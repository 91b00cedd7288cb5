"""The drafter's class in vLLM: the engine's own, with the mend of the context keys, and nothing loaded unseen.

Imported by vLLM in the process that builds the drafter. The config is read again by the core, because the engine drops
keys of a plain DFlash drafter silently; every tensor is accounted for before the first is copied, and every parameter
is looked at afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from dflash_plugins import __version__
from dflash_plugins.config import DraftConfig, read_draft_config
from dflash_plugins.errors import DFlashPluginsError, Refused
from dflash_plugins.findings import Finding, Severity, errors
from vllm_ext import cpu_mends
from vllm_ext.hooks import AT_LOADING, drift
from vllm_ext.plugin import DISABLE, read_switches

logger = logging.getLogger("vllm.dflash_plugins")

_MARKED = (torch.float32, torch.float16, torch.bfloat16)


class DraftModel(DFlashQwen3Model):
    """The engine's drafter body, applying ``input_embedding_scale``."""

    input_embedding_scale = 1.0

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [N, H] of ids [N], scaled."""
        embeddings = super().embed_input_ids(input_ids)
        return embeddings if self.input_embedding_scale == 1.0 else embeddings * self.input_embedding_scale


class MendedDraftModel(DraftModel):
    """The same with context keys normed layer by layer (bug A)."""

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        return cpu_mends.normalize_context_k_by_layer(self, all_k)


class DFlashPluginsDraftModel(DFlashQwen3ForCausalLM):
    """Serves architecture ``DFlashDraftModel`` on CPU platforms.

    Raises ``Refused`` with all reasons at once: in the constructor for what the config says, in ``load_weights`` for
    what the checkpoint holds.
    """

    non_finite_rows = 0

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        _refuse_drift()
        draft_config = _read_config(vllm_config)
        self.model_cls, context_k_norm = _choose_body()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draft_config = draft_config
        self.context_k_norm = context_k_norm
        self.num_proposals = vllm_config.speculative_config.num_speculative_tokens
        self._apply_scales(draft_config)

    def _apply_scales(self, draft_config: DraftConfig) -> None:
        self.model.input_embedding_scale = draft_config.input_embedding_scale
        multiplier, cap = draft_config.output_multiplier, draft_config.final_logit_softcapping
        if multiplier == 1.0 and cap is None:
            return
        # The engine caps before it scales, the drafter was trained the other way round:
        # cap * tanh(m * x / cap) is its own order with the cap divided by m.
        scale = multiplier * self.logits_processor.scale
        soft_cap = None if cap is None else cap / scale
        self.logits_processor = LogitsProcessor(self.config.draft_vocab_size, scale=scale, soft_cap=soft_cap)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Draft logits [N, V] of final-norm hidden states [N, H]; rows that are not finite propose nothing likely."""
        logits = super().compute_logits(hidden_states)
        if logits is None:
            return None
        logits, dropped = drop_non_finite(logits)
        if dropped and not self.non_finite_rows:
            logger.warning(
                "dflash-plugins: %d draft rows are not finite and are drafted uniformly instead (reported once); "
                "was the drafter trained in another dtype than %s?",
                dropped,
                logits.dtype,
            )
        self.non_finite_rows += dropped
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the released layout. Raises Refused, before anything is copied, for a tensor missing or unclaimed."""
        tensors = dict(weights)
        refuse_tensors(self.draft_config, tensors)
        mark_unwritten(self.named_parameters())
        super().load_weights(tensors.items())
        refuse_unwritten(self.named_parameters(), _shared(self, tensors))
        if get_tensor_model_parallel_rank() == 0:
            logger.info("dflash-plugins %s: %s", __version__, self.facts())

    def facts(self) -> str:
        """Method, mode, K, what the block looks like and what was mended, in one line."""
        from vllm.utils import cpu_triton_utils

        config = self.draft_config
        causal = "causal" if all(config.causal) else "bidirectional"
        expand_kernel = cpu_mends.expand_kernel_fact(cpu_triton_utils._expand_kernel_impl)
        return (
            f"method {config.method}, mode one pass, K {self.num_proposals} (trained for {config.k}), "
            f"{config.num_layers} {causal} layers on target layers {list(config.target_layer_ids)}; "
            f"mends: context_k_norm {self.context_k_norm}, expand_kernel {expand_kernel}"
        )


def drop_non_finite(logits: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``logits`` [N, V] with rows whose maximum is not finite set to 0, and how many they were.

    A row of zeros is a proposal drawn from a uniform q: valid for verification, where NaN would be passed on. Single
    entries of -inf (ids outside a reduced draft vocabulary) are meant and stay.
    """
    bad = ~torch.isfinite(logits.amax(-1))
    dropped = int(bad.sum())
    return (logits.masked_fill(bad.unsqueeze(-1), 0.0) if dropped else logits), dropped


def _refuse_drift() -> None:
    sentences = drift(AT_LOADING)
    if sentences:
        lines = "\n".join(f"  {sentence}" for sentence in sentences)
        raise DFlashPluginsError(f"this vLLM is not as dflash-plugins knows it ({DISABLE}=1 serves without it):\n{lines}")


def _choose_body() -> tuple[type[DFlashQwen3Model], str]:
    if cpu_mends.context_k_norm_is_right(DFlashQwen3Model._normalize_context_k):
        return DraftModel, "right as shipped"
    if read_switches(os.environ).no_context_k_norm:
        logger.warning("dflash-plugins: context keys of layers >= 1 are wrong on this CPU and their mend is off")
        return DraftModel, "off"
    return MendedDraftModel, "mended"


def _read_config(vllm_config: VllmConfig) -> DraftConfig:
    """The drafter's own config, refused with every reason; warnings are logged."""
    draft = vllm_config.speculative_config.draft_model_config
    reading = read_draft_config(_config_source(draft))
    found = list(reading.findings)
    if reading.config is not None:
        found += pair_findings(reading.config, vllm_config)
    if errors(found):
        raise Refused(f"drafter {draft.model}", errors(found))
    for finding in found:
        if finding.severity is Severity.WARNING:
            logger.warning("dflash-plugins: %s", finding)
    return reading.require()


def _config_source(draft: Any) -> Any:
    directory = Path(draft.model)
    if directory.is_dir():
        return directory
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    return get_hf_file_to_dict("config.json", draft.model, draft.revision)


def pair_findings(config: DraftConfig, vllm_config: VllmConfig) -> list[Finding]:
    """What is wrong, or worth saying, about this drafter with this target in this engine, before weights load."""
    target = vllm_config.model_config
    hidden, vocab, layers = target.get_hidden_size(), target.get_vocab_size(), target.get_total_num_hidden_layers()
    beyond = [layer for layer in config.target_layer_ids if layer >= layers]
    checks = (
        (
            config.target_hidden_size != hidden,
            _error("target-width", "target_hidden_size", config.target_hidden_size, f"the target's is {hidden}"),
        ),
        (
            config.vocab_size != vocab,
            _error("vocabulary", "vocab_size", config.vocab_size, f"the target's is {vocab}"),
        ),
        (
            bool(beyond),
            _error("target-layers", "target_layer_ids", beyond, f"the target has layers 0..{layers - 1} only"),
        ),
        (
            config.mask_token_id >= vocab,
            _error("mask-id", "mask_token_id", config.mask_token_id, f"the target embeds ids below {vocab} only"),
        ),
        (
            len(set(config.causal)) > 1 or len(set(config.windows)) > 1,
            _error("mixed-layers", "layer_types", list(config.windows), "vLLM's V1 runner serves one kind of layer"),
        ),
    )
    found = [finding for is_wrong, finding in checks if is_wrong]
    return found + _served_findings(config, vllm_config)


def _served_findings(config: DraftConfig, vllm_config: VllmConfig) -> list[Finding]:
    """How the drafter is served, where that differs from how it was trained."""
    found = []
    served = vllm_config.speculative_config.num_speculative_tokens
    if served > config.k:
        message = f"the drafter was trained for {config.k}; acceptance may collapse at every slot"
        found.append(_warning("beyond-block", "num_speculative_tokens", served, message, f"use at most {config.k}"))
    dtype = vllm_config.model_config.dtype
    if dtype == torch.float16 and config.dtype == "bfloat16":
        message = "the drafter is bfloat16; features above 65504 become infinite"
        found.append(_warning("dtype", "dtype", "float16", message, "serve in bfloat16 or float32"))
    return found


def _error(code: str, key: str, value: Any, message: str) -> Finding:
    mend = "use a drafter trained for this target"
    return Finding(code=code, severity=Severity.ERROR, key=key, value=value, message=message, mend=mend)


def _warning(code: str, key: str, value: Any, message: str, mend: str) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, key=key, value=value, message=message, mend=mend)


def mark_unwritten(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Fill floating parameters with NaN, so that what the loader leaves out can be told from what it wrote."""
    for _, parameter in parameters:
        if parameter.dtype in _MARKED:
            parameter.data.fill_(torch.nan)


def refuse_unwritten(parameters: Iterable[tuple[str, torch.nn.Parameter]], shared: Iterable[str]) -> None:
    """Refuse parameters that still hold NaN after loading, except ``shared`` ones, which the target provides."""
    shared = set(shared)
    found = [
        Finding(
            code="F28",
            severity=Severity.ERROR,
            key=name,
            value=list(parameter.shape),
            message="holds NaN after loading: the loader did not write it, or the checkpoint holds NaN",
            mend="export the drafter again in the released layout",
        )
        for name, parameter in parameters
        if name not in shared and parameter.dtype in _MARKED and bool(torch.isnan(parameter.data).any())
    ]
    if found:
        raise Refused("the loaded drafter", found)


def _shared(model: DFlashPluginsDraftModel, tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """Parameters that may stay unwritten, because the engine puts the target's in their place or never reads them."""
    if not any("embed_tokens" in name for name in tensors):
        yield "model.embed_tokens.weight"
    if not any("lm_head" in name for name in tensors):
        yield "lm_head.weight"
    if not model.model.has_separate_mask_embedding:
        yield "model.mask_embedding"
