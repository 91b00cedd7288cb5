"""The drafter's class in vLLM: the engine's own parts for DFlash, DFlash 2 and D-Loop, and nothing loaded unseen.

Imported by vLLM in the process that builds the drafter. The config is read again by the core, because the engine drops
keys of a plain DFlash drafter silently; every tensor is accounted for before the first is copied, and every parameter
is looked at afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector, DFlash2Qwen3DecoderLayer

from dflash_plugins import __version__
from dflash_plugins.checkpoint import account, id_map_findings, read_header
from dflash_plugins.config import DraftConfig, TargetConfig, read_draft_config
from dflash_plugins.errors import DFlashPluginsError, Refused, refuse_or_warn
from dflash_plugins.findings import Finding, errors
from dflash_plugins.hooks import refuse_drift
from dflash_plugins.hub import Model
from dflash_plugins.loading import header_of, mark_unwritten, refuse_unwritten
from dflash_plugins.matrix import AtHand, log_standing
from dflash_plugins.pair import (
    k_findings,
    loop_mode_finding,
    pair_findings,
    served_facts,
    served_prefix_lengths,
    serving_dtype_findings,
)
from dflash_plugins.proposals import NonFinite
from dflash_plugins.selector import candidates
from vllm_ext import cpu_mends, runner
from vllm_ext.features import feature_findings
from vllm_ext.hooks import AT_LOADING
from vllm_ext.plugin import read_switches

logger = logging.getLogger("vllm.dflash_plugins")


class DraftModel(DFlashQwen3Model):
    """The engine's drafter body, applying ``input_embedding_scale``, and with bug A mended where it is there."""

    input_embedding_scale = 1.0
    mends_context_k_norm = False

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [N, H] of ids [N], scaled."""
        embeddings = super().embed_input_ids(input_ids)
        return embeddings if self.input_embedding_scale == 1.0 else embeddings * self.input_embedding_scale

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        if self.mends_context_k_norm:
            return cpu_mends.normalize_context_k_by_layer(self, all_k)
        return super()._normalize_context_k(all_k)


class ConvolvedDraftModel(DraftModel):
    """The same with the engine's convolutions of DFlash 2 around every sublayer."""

    decoder_layer_cls = DFlash2Qwen3DecoderLayer


class DFlashPluginsDraftModel(DFlashQwen3ForCausalLM):
    """Serves ``DFlashDraftModel``, ``DFlash2DraftModel`` and ``DLoopDraftModel``: which one, the config says.

    Raises ``Refused`` with all reasons at once: in the constructor for what the config says, in ``load_weights`` for
    what the checkpoint holds.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        refuse_drift("vLLM", AT_LOADING)
        draft_config = served_config(vllm_config)
        self.model_cls = ConvolvedDraftModel if draft_config.conv else DraftModel
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draft_config = draft_config
        configs = vllm_config.model_config, _speculation(vllm_config).draft_model_config
        self.models = [Model.told(str(config.model), config.revision) for config in configs]
        self.runner_name = "v2" if vllm_config.use_v2_model_runner else "v1"
        self.target = target_facts(vllm_config.model_config)
        self.num_proposals = _speculation(vllm_config).num_speculative_tokens
        self.prefix_lengths, _ = served_prefix_lengths(draft_config, self.num_proposals)
        what = "%d draft rows are not finite and propose nothing likely instead"
        self.non_finite = NonFinite(logger, what)
        self.context_k_norm = _mend_context_k_norm(cast(DraftModel, self.model))
        self._apply_scales(draft_config)
        self._add_selector(vllm_config)
        self._refuse_other_causality()

    def _add_selector(self, vllm_config: VllmConfig) -> None:
        config = self.draft_config
        if config.selector is None:
            return
        # Without its own tag the selector would share the compile cache of the drafter's body.
        with set_model_tag("dflash_plugins_candidate_selector"):
            self.model.candidate_selector = CandidateSelector(
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                rank=config.selector.rank,
                top_k=config.selector.top_k,
                params_dtype=cast(torch.dtype, vllm_config.model_config.dtype),
                prefix="model.candidate_selector",
            )

    @property
    def candidate_selector(self) -> Any:
        """The engine's selector module, whose tables the walk reads, or None."""
        return getattr(self.model, "candidate_selector", None)

    def _refuse_other_causality(self) -> None:
        built = tuple(self.get_draft_attn_causal())
        if built != self.draft_config.causal:
            message = f"vLLM builds {built} from the same config"
            mend = "state dflash_config.causal in the drafter's config.json"
            raise Refused(
                "the drafter", [Finding.error("causality", "causal", self.draft_config.causal, message, mend)]
            )

    def _apply_scales(self, draft_config: DraftConfig) -> None:
        cast(DraftModel, self.model).input_embedding_scale = draft_config.input_embedding_scale
        multiplier, cap = draft_config.output_multiplier, draft_config.final_logit_softcapping
        if multiplier != 1.0 or cap is not None:
            scale, soft_cap = engine_order(multiplier * self.logits_processor.scale, cap)
            self.logits_processor = LogitsProcessor(self.config.draft_vocab_size, scale=scale, soft_cap=soft_cap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V_draft] of final-norm hidden [..., H], after multiplier and softcap; the same on every rank."""
        rows: torch.Tensor = self.logits_processor(self.lm_head, hidden.reshape(-1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], -1)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the target's vocabulary for rows of the head, any shape."""
        offsets = self.draft_id_to_target_id
        return draft_ids if offsets is None else draft_ids + offsets[draft_ids]

    def compute_candidates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Target ids and fp32 logits [N, C] of the best candidates, as the engine's own DFlash 2 speculator asks."""
        logits, draft_ids = candidates(self.logits(hidden_states), self.candidate_selector.top_k)
        return self.target_ids(draft_ids), logits.float()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Draft logits [N, V] of final-norm hidden states [N, H]; rows that are not finite propose nothing likely."""
        logits = super().compute_logits(hidden_states)
        if logits is None:
            return None
        logits, bad = drop_non_finite(logits)
        self.non_finite.add(bad)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        """Load the released layout. Raises Refused, before anything is copied, for a tensor missing or unclaimed."""
        stored = dict(weights)
        accounting = account(self.draft_config, header_of(stored))
        fits = pair_findings(self.draft_config, self.target, own_embedding=accounting.own_embedding)
        # Warnings about the pair were given when the config was read.
        refuse_or_warn("the drafter's checkpoint", [*errors(accounting.findings), *errors(fits)], logger)
        tensors = {name: stored[kept] for name, kept in accounting.claimed.items()}
        mark_unwritten(self.named_parameters())
        super().load_weights(tensors.items())
        refuse_unwritten(self.named_parameters(), _shared(self, tensors))
        if get_tensor_model_parallel_rank() == 0:
            logger.info("dflash-plugins %s: %s", __version__, self.facts())
            self._log_matrix()

    def _log_matrix(self) -> None:
        from vllm import __version__ as engine_version

        target, draft = self.models
        here = AtHand("vllm", engine_version, target, draft, self.draft_config.fingerprint, self.runner_name)
        log_standing(logger, here)

    def facts(self) -> str:
        """Method, mode, K, what the block looks like and what was mended, in one line."""
        from vllm.utils import cpu_triton_utils

        expand_kernel = cpu_mends.kernel_fact(cpu_triton_utils._expand_kernel_impl)
        rejection_kernel = cpu_mends.kernel_fact(cpu_triton_utils._rejection_random_sample_kernel_impl)
        return (
            f"{served_facts(self.draft_config, self.num_proposals, self.prefix_lengths)}; "
            f"mends: context_k_norm {self.context_k_norm}, expand_kernel {expand_kernel}, "
            f"rejection_kernel {rejection_kernel}"
        )


def engine_order(multiplier: float, cap: float | None) -> tuple[float, float | None]:
    """Scale and softcap for the engine, which caps before it scales, where the drafter was trained the other way round.

    cap * tanh(m * x / cap) is its order with the cap divided by m: m * (cap / m) * tanh(x / (cap / m)).
    """
    return multiplier, None if cap is None else cap / multiplier


def drop_non_finite(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` [N, V] with rows whose maximum is not finite set to 0, and which they were, bool [N].

    A row of zeros is a proposal drawn from a uniform q: valid for verification, where NaN would be passed on. Single
    entries of -inf (ids outside a reduced draft vocabulary) are meant and stay.
    """
    bad = ~torch.isfinite(logits.amax(-1))
    if not logits.is_cuda and not bool(bad.any()):
        return logits, bad  # where looking costs no wait, a copy of all logits is saved
    return logits.masked_fill(bad.unsqueeze(-1), 0.0), bad


def _mend_context_k_norm(body: DraftModel) -> str:
    """Switch the mend of bug A on where a probe finds the bug; says what was done."""
    if cpu_mends.context_k_norm_is_right(DFlashQwen3Model._normalize_context_k):
        return "right as shipped"
    if read_switches(os.environ).no_context_k_norm:
        logger.warning("dflash-plugins: context keys of layers >= 1 are wrong on this CPU and their mend is off")
        return "off"
    body.mends_context_k_norm = True
    return "mended"


def _speculation(vllm_config: VllmConfig) -> SpeculativeConfig:
    speculation = vllm_config.speculative_config
    if speculation is None:
        raise DFlashPluginsError("a drafter is built although the engine's config has no speculative_config")
    return speculation


def served_config(vllm_config: VllmConfig, *, warn: bool = True) -> DraftConfig:
    """The drafter's own config, refused with every reason before weights load; warnings are logged, or left out."""
    draft = _speculation(vllm_config).draft_model_config
    reading = read_draft_config(_config_source(draft))
    directory = Path(draft.model)
    # A checkpoint that the engine has yet to download is accounted for when it loads.
    there = directory.is_dir() and vllm_config.load_config.load_format != "dummy"
    stored = account(reading.facts, read_header(directory)) if there else None
    target = target_facts(vllm_config.model_config)
    found = [
        *reading.findings,
        *pair_findings(reading.facts, target, own_embedding=stored.own_embedding if stored else None),
        *(stored.findings if stored else ()),
    ]
    if stored is not None and not errors(stored.findings):
        found += id_map_findings(directory, stored, target.vocab_size)
    if reading.config is not None:
        # What is stored counts, not what the config says of it.
        dtype = stored.dtype if stored and stored.dtype else reading.config.dtype
        found += served_findings(reading.config, vllm_config, dtype)
    refuse_or_warn(f"drafter {draft.model}", found if warn else errors(found), logger)
    return reading.require()


def _config_source(draft: Any) -> Any:
    """Where ``read_draft_config`` finds the drafter's config: its folder, or the document as the hub has it."""
    directory = Path(draft.model)
    if directory.is_dir():
        return directory
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    return get_hf_file_to_dict("config.json", draft.model, draft.revision)


def served_findings(config: DraftConfig, vllm_config: VllmConfig, dtype: str | None) -> list[Finding]:
    """What is wrong, or worth saying, about serving this drafter, stored as ``dtype``, in this engine."""
    return [
        *k_findings(config, _speculation(vllm_config).num_speculative_tokens),
        *serving_dtype_findings(dtype, str(vllm_config.model_config.dtype)),
        *_layer_kind_findings(config, vllm_config.use_v2_model_runner),
        *_loop_findings(config, _speculation(vllm_config).num_speculative_tokens),
        *_place_findings(config, vllm_config),
        *_runner_findings(config, vllm_config.use_v2_model_runner),
        *feature_findings(vllm_config),
        *(_v2_loop_findings(vllm_config) if config.loop and vllm_config.use_v2_model_runner else ()),
    ]


def _v2_loop_findings(vllm_config: VllmConfig) -> list[Finding]:
    """Settings of the V2 runner that its own speculators take and a loop does not."""
    mend, found = "serve it without this setting", []
    if _speculation(vllm_config).use_local_argmax_reduction:
        message = "a further pass needs whole rows of logits, which this never makes"
        found.append(Finding.error("loop-option", "use_local_argmax_reduction", True, message, mend))
    if getattr(vllm_config, "watermark_config", None) is not None:
        found.append(
            Finding.error("loop-option", "watermark_config", "set", "D-Loop drafts cannot be watermarked", mend)
        )
    return found


def _loop_findings(config: DraftConfig, k: int) -> list[Finding]:
    mode = None if config.loop is None else config.loop.mode
    unserved = [] if mode in (None, "refine") else [loop_mode_finding(mode)]
    return [*unserved, *served_prefix_lengths(config, k)[1]]


def _place_findings(config: DraftConfig, vllm_config: VllmConfig) -> list[Finding]:
    """vLLM's convolutions and its speculator read these keys in one place only."""
    nested = getattr(_speculation(vllm_config).draft_model_config.hf_config, "dflash_config", None) or {}
    wanted = {} if config.conv is None else {"conv_kernel_size": config.conv.kernel_size}
    wanted |= {} if config.conv is None else {"conv_group_size": config.conv.group_size}
    wanted |= {} if config.selector is None else {"selector_top_k": config.selector.top_k}
    message, mend = "vLLM reads this key in dflash_config only", "write it there in the drafter's config.json"
    return [
        Finding.error("place", f"dflash_config.{key}", nested.get(key), f"{message}; the drafter needs {value}", mend)
        for key, value in wanted.items()
        if nested.get(key) != value
    ]


def _runner_findings(config: DraftConfig, v2: bool) -> list[Finding]:
    """A loop or a walk that the runner does not know of would silently draft as plain DFlash."""
    if config.method == "dflash" or (config.method == "dflash2" and v2) or runner.in_force():
        return []
    message = f"the runner of this vLLM drafts this as plain DFlash: {runner.why_not() or 'the plugin was not asked'}"
    mend = "use an engine version of the compatibility matrix"
    return [Finding.error("runner-hooks", "architectures", config.architecture, message, mend)]


def _layer_kind_findings(config: DraftConfig, use_v2_model_runner: bool) -> list[Finding]:
    kinds = sorted(set(zip(config.causal, config.windows, strict=True)), key=str)
    if len(kinds) == 1 or use_v2_model_runner:
        return []
    message = "vLLM's V1 runner serves drafters whose layers all have one window and one causality"
    mend = "serve it on a platform with vLLM's V2 runner"
    return [Finding.error("mixed-layers", "layer_types", [list(kind) for kind in kinds], message, mend)]


def target_facts(model_config: ModelConfig) -> TargetConfig:
    """The target as the core describes it, from the engine's own reading."""
    text = model_config.hf_text_config
    return TargetConfig(
        architecture=model_config.architecture,
        num_layers=model_config.get_total_num_hidden_layers(),
        hidden_size=model_config.get_hidden_size(),
        vocab_size=model_config.get_vocab_size(),
        rope_theta=(getattr(text, "rope_parameters", None) or {}).get("rope_theta"),
    )


def _shared(model: DFlashPluginsDraftModel, tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """Parameters that may stay unwritten, because the engine puts the target's in their place or never reads them."""
    if not any("embed_tokens" in name for name in tensors):
        yield "model.embed_tokens.weight"
    if not any("lm_head" in name for name in tensors):
        yield "lm_head.weight"
    if not model.model.has_separate_mask_embedding:
        yield "model.mask_embedding"
