"""D-Loop on vLLM's V2 runner: further passes inside the part of a round that a CUDA graph captures whole.

The schedule, the walk and what is kept of each row are the core's (``methods.base.draft_in_passes``). Here they meet
the engine's buffers: block ids are written where the next pass reads them, tokens are drawn with the engine's own
stateless noise (so that drafting, accepting and resampling stay independent as the engine arranges it), and the scores
that tokens were drawn from go where the engine's rejection sampler looks for them. No shape depends on data, and
nothing waits for the device.

Rows of a captured graph that no request owns carry request index -1: they are drafted like the others, from whatever
ids their block holds, and nothing of them is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from dflash_plugins.methods.base import Drafted, OnDrafter, choose_by_argmax, draft_in_passes
from dflash_plugins.selector import Choice
from vllm_ext.dflash import DFlashPluginsDraftModel, served_config
from vllm_ext.runner import DLOOP, draft_architectures

InitSpeculator = Callable[..., Any]


def wrapped_init_speculator(shipped: InitSpeculator) -> InitSpeculator:
    """The engine's ``init_speculator(vllm_config, device, ...)``, asked only where the drafter is no D-Loop drafter."""

    @functools.wraps(shipped)
    def init_speculator(vllm_config: VllmConfig, device: torch.device, *rest: Any, **named: Any) -> Any:
        ours = speculator_for(vllm_config, device)
        return shipped(vllm_config, device, *rest, **named) if ours is None else ours

    return init_speculator


def speculator_for(vllm_config: VllmConfig, device: torch.device) -> LoopSpeculator | None:
    """Our speculator where the drafter is a D-Loop drafter, else None. Raises Refused with every reason."""
    if draft_architectures(vllm_config).isdisjoint(DLOOP):
        return None
    config = served_config(vllm_config, warn=False)  # the drafter's class will warn
    kind = LoopSpeculator if config.selector is None else SelectorLoopSpeculator
    return kind(vllm_config, device)


@dataclass(frozen=True)
class EngineBlocks(OnDrafter):
    """``Backbone`` of the core on the blocks in the speculator's buffers; ``run`` is one forward, hidden [N, H]."""

    drafter: DFlashPluginsDraftModel
    speculator: LoopSpeculator
    num_reqs: int
    run: Callable[[], Tensor]

    @property
    def ids(self) -> Tensor:
        """The input buffer itself, int32 [R, 1 + K]; the engine has laid out ``[anchor, MASK ...]``."""
        width = self.speculator.num_query_per_req
        return self.speculator.input_buffers.input_ids[: self.num_reqs * width].view(self.num_reqs, width)

    def hidden(self, known: Tensor, slots: slice) -> Tensor:
        """See ``Backbone``. Every pass rewrites the K/V of the block's own rows at the same places."""
        self.ids[:, 1 : 1 + known.shape[1]] = known
        k = self.speculator.num_speculative_steps
        rows = self.run()[self.speculator.sample_indices[: self.num_reqs * k]]
        return rows.view(self.num_reqs, k, -1)[:, slots]


class LoopSpeculator(DFlashSpeculator):
    """DFlash backbone: slots are chosen by themselves, pass after pass."""

    _speculator_name = "D-Loop (refine)"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.dropped_blocks = torch.zeros((), dtype=torch.int64, device=device)
        """Blocks so far whose logits were not finite, and which were drafted uniformly instead."""

    @property
    def drafter(self) -> DFlashPluginsDraftModel:
        """The drafter, once it is loaded."""
        return cast(DFlashPluginsDraftModel, self.model)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        run = (num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode)
        prefix_lengths = self.drafter.prefix_lengths
        if not prefix_lengths:
            super()._generate_draft(num_reqs, *run)
            return
        blocks = EngineBlocks(self.drafter, self, num_reqs, lambda: self._run_model(*run))
        anchors, k = blocks.ids[:, 0], self.num_speculative_steps
        drafted = draft_in_passes(blocks, anchors, k, self._choose, prefix_lengths)
        self.draft_tokens[:num_reqs] = drafted.ids
        self._keep(drafted)
        dropped = drafted.dropped & (self.sample_idx_mapping[: num_reqs * k : k] >= 0)
        self.dropped_blocks += dropped.sum()
        self.drafter.non_finite.add(dropped)

    def _choose(self, scores: Tensor, first: int) -> Choice:
        """``selector.Choose``: an argmax, or a draw with the noise that the engine gives to these places."""
        rows, k = scores.shape[0], self.num_speculative_steps
        slots = slice(first, first + scores.shape[1])
        places = (self.sample_idx_mapping, self.sample_pos, self.sample_col)
        requests, positions, columns = (place[: rows * k].view(rows, k)[:, slots].flatten() for place in places)
        if self.draft_logits is None:
            choice = choose_by_argmax(scores, first)
        else:
            # A draw is keyed by the position before the drawn token's own.
            choice = self._draw(scores, requests, positions - 1, columns)
        self._maybe_predict_acceptance(scores.flatten(0, 1), requests, columns)
        return choice

    def _draw(self, scores: Tensor, requests: Tensor, positions: Tensor, columns: Tensor) -> Choice:
        """Draws over target ids; the engine's primitive keeps the rows of scores where they are looked for."""
        flat = scores.flatten(0, 1)
        head_rows = torch.arange(flat.shape[1], device=flat.device)
        names = self.drafter.target_ids(head_rows)
        if names is head_rows:
            index = self._gumbel(flat, requests, positions, columns)
        else:
            whole = flat.new_full((flat.shape[0], self.vocab_size), -torch.inf)
            whole[:, names] = flat
            row_of = names.new_zeros(self.vocab_size).scatter_(0, names, head_rows)
            index = row_of[self._gumbel(whole, requests, positions, columns)]
        return Choice(index.view(scores.shape[:2]), None)

    def _gumbel(self, scores: Tensor, requests: Tensor, positions: Tensor, columns: Tensor | None) -> Tensor:
        return gumbel_sample(
            scores,
            requests,
            self.temperature,
            self.seeds,
            positions,
            apply_temperature=True,
            is_drafting=True,
            logits_cache=None if columns is None else self.draft_logits,
            logits_cache_col=columns,
            use_fp64=self.use_fp64_gumbel,
        )

    def _keep(self, drafted: Drafted) -> None:
        """Nothing is left to be kept: drawing has done it."""


class SelectorLoopSpeculator(LoopSpeculator, DFlash2Speculator):
    """DFlash 2 backbone: one walk through all passes; what is kept are the scores of each slot's candidates."""

    def _draw(self, scores: Tensor, requests: Tensor, positions: Tensor, columns: Tensor) -> Choice:
        """Draws over the candidates of each slot, whose scores are kept for later."""
        index = self._gumbel(scores.flatten(0, 1).contiguous(), requests, positions, None)
        return Choice(index.view(scores.shape[:2]), scores)

    def _keep(self, drafted: Drafted) -> None:
        """As the engine keeps its own walk's: fp32, -inf outside the candidates."""
        if drafted.rows is None or drafted.candidates is None or self.draft_logits is None:
            return
        rows, k = drafted.ids.shape
        self.candidate_sampler.scores[:rows] = drafted.rows
        requests = self.sample_idx_mapping[: rows * k]
        self.candidate_sampler._cache_draft_logits(
            drafted.candidates.contiguous(), rows * k, requests, self.draft_logits
        )
