"""The drafter's class in SGLang: the engine's own parts for DFlash, DFlash 2 and D-Loop, and nothing loaded unseen."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.dflash import CandidateSelector, DFlashDraftModel
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from torch import Tensor, nn

from dflash_plugins import __version__
from dflash_plugins.checkpoint import account
from dflash_plugins.config import DraftConfig
from dflash_plugins.drafter import scale_and_cap
from dflash_plugins.errors import DFlashPluginsError, Refused
from dflash_plugins.findings import Finding, errors
from dflash_plugins.loading import header_of, mark_unwritten, refuse_unwritten
from dflash_plugins.matrix import AtHand, log_standing
from dflash_plugins.pair import served_facts
from sglang_ext.serving import Served

logger = logging.getLogger("sglang.dflash_plugins")


class DFlashPluginsDraftModel(DFlashDraftModel):
    """Serves ``DFlashDraftModel``, ``DFlash2DraftModel`` and ``DLoopDraftModel``: which one, the config says.

    ``serving`` is put here by ``runner.prepare`` before the engine builds the drafter. Raises ``Refused`` for what
    the checkpoint holds, before anything is copied.
    """

    serving: Served | None = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        if self.serving is None:
            raise DFlashPluginsError("a drafter is built that the plugin was not asked to serve")
        super().__init__(config, quant_config, prefix)
        # ``draft_config`` is the engine's own reading.
        self.facts: DraftConfig = self.serving.draft
        self._add_selector()
        self.own_head: nn.Parameter | None = None
        self.d2t: Tensor | None = None
        self.target_head: nn.Module | None = None
        self._set_attention()

    def _add_selector(self) -> None:
        if self.facts.selector is None:
            return
        # Under the name that the checkpoint and the engine give it.
        self.candidate_selector = CandidateSelector(
            hidden_size=self.facts.hidden_size,
            vocab_size=self.facts.vocab_size,
            state_rank=self.facts.selector.rank,
            top_k=self.facts.selector.top_k,
        )

    def _set_attention(self) -> None:
        """Causality as the drafter was trained, wherever its config says so."""
        for layer, causal in zip(self.layers, self.facts.causal, strict=True):
            layer.self_attn.attn.attn_type = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
            if self.serving is not None and self.serving.on_cpu:
                layer.self_attn.use_table_qk_norm_rope = False  # a Triton kernel for bf16

    def take_target_head(self, head: nn.Module) -> None:
        """Draft with the target's ``head`` where the drafter has none; ``Refused`` where it cannot be multiplied by."""
        if self.own_head is None and not is_dense_head_weight(getattr(head, "weight", None)):
            message = "the target's head is quantised, and candidates need its rows in full"
            mend = "serve a target whose lm_head is not quantised"
            raise Refused(
                "the target", [Finding.error("quantised-head", "lm_head", type(head).__name__, message, mend)]
            )
        self.target_head = head

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V_draft] of final-norm ``hidden`` [..., H], after multiplier and softcap; equal on all ranks."""
        # In two dimensions: with more, torch multiplies bfloat16 on a CPU ten times as slowly.
        rows = hidden.reshape(-1, hidden.shape[-1])
        return scale_and_cap(self._head_of(rows).view(*hidden.shape[:-1], -1), self.facts)

    def _head_of(self, rows: Tensor) -> Tensor:
        """Logits [N, V_draft] of ``rows`` [N, H] as the head gives them."""
        if self.own_head is not None:
            return rows.to(self.own_head.dtype) @ self.own_head.T
        assert self.target_head is not None
        weight = cast(Tensor, self.target_head.weight)
        logits = rows.to(weight.dtype) @ weight.T
        if get_parallel().tp_size > 1:
            from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather

            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        return logits[..., : self.facts.vocab_size]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for rows of the head, any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the released layout. Raises Refused, before anything is copied, for a tensor missing or unclaimed."""
        stored = dict(weights)
        accounting = account(self.facts, header_of(stored))
        if errors(accounting.findings):
            raise Refused("the drafter's checkpoint", list(errors(accounting.findings)))
        tensors = {name: stored[kept] for name, kept in accounting.claimed.items()}
        device = self.fc.weight.device
        head, d2t = tensors.pop("lm_head.weight", None), tensors.pop("d2t", None)
        if head is not None:
            self.own_head = nn.Parameter(head.to(device, self.fc.weight.dtype), requires_grad=False)
        if d2t is not None:
            self.d2t = d2t.to(device, torch.int64)
        parameters = dict(self.named_parameters())
        parameters.pop("own_head", None)
        mark_unwritten(parameters.items())
        super().load_weights(tensors.items())
        refuse_unwritten(parameters.items(), ())
        if get_parallel().tp_rank == 0:
            logger.info("dflash-plugins %s: %s", __version__, self.describe())
            self._log_matrix()

    def _log_matrix(self) -> None:
        from sglang import __version__ as engine_version

        assert self.serving is not None
        target, draft = self.serving.models
        log_standing(logger, AtHand("sglang", engine_version, target, draft, self.facts.fingerprint))

    def describe(self) -> str:
        """Method, mode, K and what the block looks like, in one line."""
        assert self.serving is not None
        facts = served_facts(self.facts, self.serving.k, self.serving.prefix_lengths)
        return f"{facts}; ours because of: {'; '.join(self.serving.reasons)}"

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch, without the target's head, which is only lent."""
        for name, parameter in super().named_parameters(*arguments, **options):
            if not name.startswith("target_head."):
                yield name, parameter
