"""Our worker in SGLang: the engine's own, with the core drafting and, where it has to, verifying.

The engine lays out the block, runs the first pass, verifies on the target and keeps both caches. Its seams are the
method that turns the first pass into proposals and the one that turns target logits into an accepted prefix. A further
pass runs the drafter again on the same slots, with the tokens REALLY drafted in the place of their masks.
"""

from __future__ import annotations

import inspect
import logging
import os
from dataclasses import replace
from typing import Any, cast

import torch
from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _commit_accept
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from torch import Tensor

from dflash_plugins.methods.base import OnDrafter, choose_by_argmax, draft_in_passes, realised_q
from dflash_plugins.proposals import NonFinite, OneHot, Proposals, Sparse
from dflash_plugins.selector import Choose, choose_by_uniforms
from sglang_ext import acceptance
from sglang_ext.dflash import DFlashPluginsDraftModel
from sglang_ext.penalties import Outputs, counts_tokens

logger = logging.getLogger("sglang.dflash_plugins")


class VerifyingWorker(DFlashWorkerV2):
    """The engine's worker, with the core verifying sampled requests where the engine has no kernel for it.

    Rules that count a request's output hold for every row of a block. That is all of it on a platform without the
    kernel where the engine drafts by itself.
    """

    drafts = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._core_may_verify = acceptance.core_may_verify(os.environ)
        self._accepts_target_choices = "target_predict" in inspect.signature(super()._accept_block).parameters
        self._outputs = Outputs(self.model_config.vocab_size)
        self._counting: Any = ()
        self._first_target_forward = self._target_worker.forward_batch_generation
        self._target_worker.forward_batch_generation = self._target_forward

    def forward_batch_generation(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """As the engine, with rules that count tokens applied to every row instead of once to a block."""
        if not any(map(counts_tokens, batch.reqs or ())):
            return super().forward_batch_generation(batch, *arguments, **options)
        prefill, shipped, requests = batch.forward_mode.is_extend(), batch.sampling_info, list(batch.reqs)
        if prefill:
            batch.sampling_info = self._outputs.at_prefill(requests, shipped)
        else:
            batch.sampling_info, self._counting = replace(shipped, penalizer_orchestrator=None), requests
        try:
            result = super().forward_batch_generation(batch, *arguments, **options)
        finally:
            shipped.grammar_mask = batch.sampling_info.grammar_mask
            batch.sampling_info, self._counting = shipped, ()
        if prefill:
            self._outputs.begin(requests, result.next_token_ids)
        else:
            self._outputs.add(requests, result.next_token_ids.view(len(requests), -1), result.accept_lens)
        return result

    def _target_forward(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        result = self._first_target_forward(batch, *arguments, **options)
        if self._counting:
            block_ids = options["forward_batch"].input_ids.view(len(self._counting), -1)
            self._outputs.penalise(self._counting, block_ids, result.logits_output.next_token_logits)
        return result

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Sampled requests are verified by the core: nothing falls back to greedy, nothing to warn of."""
        if not self._core_may_verify:
            super()._validate_phase1_sampling_support(batch)

    def _verifies(self, sampling: Any) -> bool:
        """Whether the core verifies this batch, and so may be given proposals that were drawn."""
        all_greedy, engine_can = sampling is None or sampling.is_all_greedy, is_dflash_sampling_verify_available()
        return acceptance.ours(
            drafts=self.drafts, all_greedy=all_greedy, engine_can=engine_can, allowed=self._core_may_verify
        )

    def _accept_block(self, *, candidates: Tensor, next_token_logits: Tensor, sampling_info: Any, **more: Any) -> Any:
        if not self._verifies(sampling_info):
            return super()._accept_block(
                candidates=candidates, next_token_logits=next_token_logits, sampling_info=sampling_info, **more
            )
        drafted = proposals_of(candidates, self._selector_sample)
        verdict = acceptance.accept(candidates, drafted, next_token_logits, sampling_info)
        accepted = verdict.accepted.to(torch.int32)
        bonus = verdict.emitted_ids.gather(1, verdict.accepted[:, None])[:, 0]
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, accepted)
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, bonus)
        out_tokens, commit_lens = _commit_accept(candidates, accepted, bonus)
        found = (accepted, commit_lens, bonus, out_tokens, None)
        return found if self._accepts_target_choices else (*found, None)


def proposals_of(candidates: Tensor, sample: Any) -> Proposals:
    """Proposals of blocks [R, B]. ``sample`` is ours, or (candidates, q) [R, K, C] of the engine's walk, or None."""
    if isinstance(sample, Proposals):
        return sample
    q = OneHot() if sample is None else Sparse(sample[0].long(), sample[1].float())
    return Proposals.of(candidates[:, 1:], q)


class DFlashPluginsWorker(VerifyingWorker):
    """Drafts whole blocks in as many passes and by whichever choice the drafter's config says."""

    drafts = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        drafter = self.drafter
        assert drafter.serving is not None
        self.prefix_lengths = drafter.serving.prefix_lengths
        self.num_proposals = int(self.block_size) - 1
        what = "the drafts of %d requests are not finite and none of their tokens is taken"
        self.non_finite = NonFinite(logger, what)
        drafter.take_target_head(self._target_worker.model_runner.model.lm_head)
        if drafter.facts.input_embedding_scale != 1.0:
            self._noise_embed_scale = drafter.facts.input_embedding_scale
        # The engine asks for proposals through the method below wherever it has a selector: here always.
        self.selector = drafter
        self._block: Any = None
        self._first_forward = self.draft_model_runner.forward
        self.draft_model_runner.forward = self._forward_and_remember

    @property
    def drafter(self) -> DFlashPluginsDraftModel:
        """The drafter."""
        return cast(DFlashPluginsDraftModel, self.draft_model)

    def _forward_and_remember(self, forward_batch: Any, *arguments: Any, **options: Any) -> Any:
        self._block = forward_batch
        return self._first_forward(forward_batch, *arguments, **options)

    def _maybe_build_draft_sampler(self) -> None:
        """Tokens are chosen between passes, outside of what a graph holds."""
        return

    def _propose_selector_block(
        self, *, draft_logits_output: Any, bs: int, lm_head: Any, anchor_token_ids: Tensor, sampling_info: Any
    ) -> Tensor:
        backbone = EngineBlock(self, draft_logits_output.hidden_states.view(bs, self.num_proposals + 1, -1))
        choose = self._choose(bs, sampling_info)
        with torch.inference_mode():
            drafted = draft_in_passes(backbone, anchor_token_ids, self.num_proposals, choose, self.prefix_lengths)
        self.non_finite.add(drafted.dropped)
        if self._verifies(sampling_info):
            self._selector_sample = Proposals.of(drafted.ids, realised_q(backbone, drafted), dropped=drafted.dropped)
        return drafted.ids

    def _choose(self, rows: int, sampling: Any) -> Choose:
        """As the engine drafts: without a selector always the best token, with one at each request's temperature."""
        if self.drafter.candidate_selector is None or not self._verifies(sampling):
            return choose_by_argmax
        temperature = torch.where(sampling.top_ks.view(-1) <= 1, 0.0, sampling.temperatures.view(-1))
        uniforms = torch.rand(rows, self.num_proposals, device=temperature.device)
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, uniforms)
        return choose_by_uniforms(temperature, uniforms)

    def run_pass_again(self, block_ids: Tensor) -> Tensor:
        """Final-norm hidden states [R, B, H] of ``block_ids`` [R, B] at the places of the first pass."""
        embed = self._target_worker.model_runner.model.get_input_embeddings()
        embeddings = embed(block_ids)
        if self._noise_embed_scale != 1.0:
            embeddings = embeddings * self._noise_embed_scale
        batch = self._block
        batch.input_ids = block_ids.flatten()
        batch.input_embeds = embeddings.view(-1, embeddings.shape[-1])
        hidden: Tensor = self._first_forward(batch).logits_output.hidden_states
        return hidden.view(*block_ids.shape, -1)


class EngineBlock(OnDrafter):
    """``Backbone`` of the core on the worker's block after its first pass: ``first`` [R, B, H], anchors included."""

    def __init__(self, worker: DFlashPluginsWorker, first: Tensor) -> None:
        self._worker, self._first, self.drafter = worker, first, worker.drafter
        self.block_ids = worker._block.input_ids.view(first.shape[:2])

    def hidden(self, known: Tensor, slots: slice) -> Tensor:
        """See ``Backbone``. The first pass has been run by the engine."""
        rows = self._first
        if slots.start:
            block_ids = self.block_ids.clone()
            block_ids[:, 1 : slots.start + 1] = known
            rows = self._worker.run_pass_again(block_ids)
        return rows[:, slots.start + 1 : slots.stop + 1]
