"""Verification of sampled requests where SGLang has no kernel for it, or where our worker drafts: the core's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_plugins.proposals import Proposals
from dflash_plugins.switches import read_switches
from dflash_plugins.verify import Uniforms, Verdict, verify_sampled

logger = logging.getLogger("sglang.dflash_plugins")

NO_ACCEPTANCE = "DFLASH_PLUGINS_NO_ACCEPTANCE"
"""True: the engine verifies sampled requests by itself. For tests: without its kernel it takes the argmax instead."""


def target_probs(logits: Tensor, sampling: Any) -> Tensor:
    """What SGLang would draw each row from, fp32 [R, B, V]; rows of a greedy request are one-hot at their argmax.

    ``logits`` [R, B, V] are after bias and grammar; ``sampling`` is the engine's ``SamplingBatchInfo`` of R requests.
    The rules are those of the engine's own sampler in torch (0.5.21: ``layers/sampler.py``): temperature and softmax;
    then, of the tokens in falling order, the first top_k, those before which less than top_p lies (of all mass, also of
    what top_k took away), and those with at least min_p of the best one's probability.
    """
    greedy = (sampling.top_ks <= 1).view(-1, 1, 1)
    probs = torch.softmax(logits.float() / sampling.temperatures.view(-1, 1, 1), dim=-1)
    if sampling.need_top_k_sampling or sampling.need_top_p_sampling or sampling.need_min_p_sampling:
        probs = _filtered(probs, sampling)
    one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(greedy, one_hot, probs)


def _filtered(probs: Tensor, sampling: Any) -> Tensor:
    in_order, ids = probs.sort(dim=-1, descending=True)
    before = in_order.cumsum(dim=-1) - in_order
    rank = torch.arange(probs.shape[-1], device=probs.device)
    out = (rank >= sampling.top_ks.view(-1, 1, 1)) | (before > sampling.top_ps.view(-1, 1, 1))
    if sampling.need_min_p_sampling:
        out |= in_order < in_order[..., :1] * sampling.min_ps.view(-1, 1, 1)
    kept = in_order.masked_fill(out, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, kept)


def accept(candidates: Tensor, proposals: Proposals, logits: Tensor, sampling: Any) -> Verdict:
    """Verify one block per request. ``candidates`` [R, B] are the anchors and ``proposals``, ``logits`` [R * B, V]."""
    rows, width = candidates.shape
    uniforms = Uniforms(
        torch.rand(rows, width - 1, dtype=torch.float64, device=logits.device),
        torch.rand(rows, dtype=torch.float64, device=logits.device),
    )
    return verify_sampled(proposals, target_probs(logits.view(rows, width, -1), sampling), uniforms)


def ours(*, drafts: bool, all_greedy: bool, engine_can: bool, allowed: bool = True) -> bool:
    """Whether the core verifies a batch: a sampled one, drafted by our worker or beyond what the engine can.

    ``allowed`` is ``core_may_verify`` of the environment.
    """
    return allowed and not all_greedy and (drafts or not engine_can)


def core_may_verify(environment: Mapping[str, str]) -> bool:
    """False where ``NO_ACCEPTANCE`` is set, which is warned of; ValueError where it is neither true nor false."""
    (switched_off,) = read_switches(environment, (NO_ACCEPTANCE,))
    if switched_off:
        logger.warning(
            "dflash-plugins: %s is set: SGLang verifies sampled requests by itself, and where it has no kernel for it "
            "their tokens are the most probable ones instead of drawn",
            NO_ACCEPTANCE,
        )
    return not switched_off
