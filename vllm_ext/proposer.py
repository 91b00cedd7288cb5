"""DFlash 2 and D-Loop on vLLM's V1 runner: the engine's own proposer, with the core choosing the tokens.

The engine prepares inputs, stores context K/V and runs the first pass. From its hidden states on, the core's pass
runner decides; a further pass rewrites the ids of the block in the engine's buffers and runs the model again with the
metadata of the first. Context K/V is stored once; the block's own rows are rewritten at the same slots.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS
from vllm.v1.spec_decode.dflash import DFlashProposer

from dflash_plugins.methods.base import Drafted, OnDrafter, choose_by_argmax, draft_in_passes, realised_q
from dflash_plugins.proposals import Dense, Distribution, Sparse
from dflash_plugins.selector import Choose, choose_by_uniforms
from vllm_ext.dflash import DFlashPluginsDraftModel

logger = logging.getLogger("vllm.dflash_plugins")


class DFlashPluginsProposer(DFlashProposer):
    """Drafts whole blocks of the configured K, in as many passes and by whichever choice the drafter's config says."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.block_k: int = self.num_speculative_tokens
        self._first_pass: dict[str, Any] = {}
        if self.use_local_argmax_reduction:
            logger.warning("dflash-plugins: use_local_argmax_reduction saves nothing here, logits are gathered whole")

    @property
    def drafter(self) -> DFlashPluginsDraftModel:
        """The drafter itself, without what the engine may have wrapped around it for CUDA graphs."""
        model: Any = self.model
        return cast(DFlashPluginsDraftModel, model.unwrap() if hasattr(model, "unwrap") else model)

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Ids [R, num_speculative_tokens]. A step that asks for fewer cuts: fewer masks would change every proposal."""
        ids = super().propose(self.block_k, *args, **kwargs)
        if num_speculative_tokens < self.block_k and self._last_draft_probs is not None:
            self._last_draft_probs = self._last_draft_probs[:, :num_speculative_tokens].contiguous()
        return ids[:, :num_speculative_tokens]

    def build_per_group_and_layer_attn_metadata(
        self, cad: Any, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """As the engine; kept for further passes."""
        per_group, per_layer = super().build_per_group_and_layer_attn_metadata(cad, draft_index)
        self._first_pass["attn_metadata"] = per_layer
        return per_group, per_layer

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> tuple[Any, int, Any]:
        decided: tuple[Any, int, Any] = super()._determine_batch_execution_and_padding(*args, **kwargs)
        mode, num_tokens, across_dp = decided
        self._first_pass["context"] = {
            "cudagraph_runtime_mode": mode, "num_tokens": num_tokens, "num_tokens_across_dp": across_dp,
        }  # fmt: skip
        return decided

    def build_model_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], int]:
        """As the engine; kept for further passes."""
        inputs, slots = super().build_model_inputs_first_pass(*args, **kwargs)
        self._first_pass |= {"inputs": inputs, "slots": slots}
        return inputs, slots

    def run_pass_again(self) -> torch.Tensor:
        """Final-norm hidden states [N, H] of the block ids that now stand in ``input_ids``."""
        first = self._first_pass
        slot_mapping = self._get_slot_mapping(first["slots"])
        with set_forward_context(
            first["attn_metadata"], self.vllm_config, slot_mapping=slot_mapping, **first["context"]
        ):
            hidden: torch.Tensor = self.model(**first["inputs"])
        return hidden

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        backbone = EngineBlock(self, hidden_states)
        choose = self._choose(backbone.block.shape[0], sampling_metadata)
        anchors = backbone.block[:, 0].long()
        drafted = draft_in_passes(backbone, anchors, self.block_k, choose, self.drafter.prefix_lengths)
        self.drafter.non_finite.add(drafted.dropped)
        return drafted.ids.flatten(), self._probs(backbone, drafted)

    def _choose(self, rows: int, sampling_metadata: SamplingMetadata) -> Choose:
        """Argmax, or draws at each request's temperature; a seeded request draws from its own generator."""
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return choose_by_argmax
        temperature = cast(torch.Tensor, sampling_metadata.temperature)  # there, where not all are greedy
        temperature = torch.where(temperature < _SAMPLING_EPS, 0.0, temperature)
        uniforms = torch.rand(rows, self.block_k, device=self.device)
        for row, generator in sampling_metadata.generators.items():
            uniforms[row] = torch.rand(self.block_k, generator=generator, device=self.device)
        return choose_by_uniforms(temperature, uniforms)

    def _probs(self, backbone: EngineBlock, drafted: Drafted) -> torch.Tensor | None:
        """The realised q as the engine's rejection sampler reads it, fp32 [R * K, V]; None where it is one-hot."""
        if drafted.rows is None:
            return None
        q = dense(realised_q(backbone, drafted), self.vllm_config.model_config.get_vocab_size())
        return q.flatten(0, 1)


class EngineBlock(OnDrafter):
    """``Backbone`` of the core on the proposer's buffers after its first pass.

    ``hidden_states`` [R * K, H], request by request, are the mask rows of that pass.
    """

    def __init__(self, proposer: DFlashPluginsProposer, hidden_states: torch.Tensor) -> None:
        self._proposer, self._k, self.drafter = proposer, proposer.block_k, proposer.drafter
        self._first = hidden_states.view(-1, self._k, hidden_states.shape[-1])
        width = self._k + 1
        self.block = proposer.input_ids[: len(self._first) * width].view(-1, width)

    def hidden(self, known: torch.Tensor, slots: slice) -> torch.Tensor:
        """See ``Backbone``. The first pass has been run by the engine."""
        if slots.start == 0:
            return self._first[:, slots]
        self.block[:, 1 : slots.start + 1] = known
        rows = self._proposer.run_pass_again()[: self.block.numel()]
        return rows.view(*self.block.shape, -1)[:, slots.start + 1 : slots.stop + 1]


def dense(q: Distribution, vocab_size: int) -> torch.Tensor:
    """``q`` over the whole target vocabulary, fp32 [R, K, V]."""
    if isinstance(q, Dense):
        return q.probs
    if not isinstance(q, Sparse):
        raise TypeError("a one-hot q has no rows of its own")
    # scatter_add_: a slot may name an id twice where a reduced head maps two rows to one token.
    return q.probs.new_zeros(*q.ids.shape[:2], vocab_size).scatter_add_(2, q.ids, q.probs)
