"""Losses of a drafter and of its selector (methods.md sections 3 to 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody reads

from dflash_plugins.selector import SelectorTables, move_scores

IGNORED = -1
GAMMA_BY_BLOCK = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class Processes:
    """Those that share the blocks of a step: how many, and ``total``, the sum over them of a scalar.

    A loss divides by the weights of all their slots and counts ``count`` times, so that the mean of the processes'
    losses is the loss of their blocks taken together, however slots that bear no loss are spread over them.
    """

    count: int = 1
    total: Callable[[Tensor], Tensor] = lambda scalar: scalar


ALONE = Processes()


def slot_weights(k: int, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for slots 1..k, fp32 [k]: an early slot decides whether a later one counts.

    Slots are counted from the first masked one: given tokens are not drafted.
    """
    return torch.exp(-torch.arange(k, dtype=torch.float32) / gamma)


def block_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    teacher: Tensor | None = None,
    soft_share: float = 0.0,
    expected_weight: float = 0.0,
    processes: Processes = ALONE,
) -> Tensor:
    """Weighted mean over slots of hard and soft cross-entropy, a scalar.

    ``logits`` [N, K, V_draft]; ``labels`` int64 [N, K] in rows of the draft's head, ``IGNORED`` where the true token is
    unknown or not in the head; ``weights`` fp32 [K]; ``teacher`` logits [N, K, V_draft] of the target over the same
    rows. ``soft_share`` of the loss is the cross-entropy to the teacher's distribution, the rest that to the label.
    ``expected_weight`` times ``unexpected`` is added.
    """
    log_q = F.log_softmax(at_least_fp32(logits), dim=-1)
    known = labels != IGNORED
    picked = log_q.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    per_slot = -picked * (1.0 - soft_share)
    if teacher is not None and soft_share > 0.0:
        per_slot = per_slot - (at_least_fp32(teacher).softmax(-1) * log_q).sum(-1) * soft_share
    loss = _weighted_mean(per_slot, weights * known, processes)
    return loss + expected_weight * unexpected(picked, known, processes) if expected_weight else loss


def unexpected(log_q: Tensor, known: Tensor, processes: Processes = ALONE) -> Tensor:
    """K minus the number of proposals that are expected to be accepted, over K: mean over blocks, a scalar in [0, 1].

    ``log_q`` [N, K] of the true tokens; ``known`` bool [N, K]. Slot k counts with q_1 * ... * q_k, the chance that
    drawn proposals agree with the truth so far; where a true token cannot be proposed nothing after it counts. Unlike
    a cross-entropy it spends nothing on tokens that are out of reach. Blocks without a known slot are left out.
    """
    accepted = torch.where(known, log_q.exp(), torch.zeros_like(log_q)).cumprod(-1).mean(-1)
    return _weighted_mean(1.0 - accepted, known.any(-1).to(log_q.dtype), processes)


def keep_best(logits: Tensor, count: int | None) -> Tensor:
    """Logits [..., V] of the ``count`` best tokens, -inf for the others; all of them for None."""
    if count is None or count >= logits.shape[-1]:
        return logits
    best = logits.topk(count, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter_(-1, best.indices, best.values)


def selector_loss(
    selector: SelectorTables,
    hidden: Tensor,
    candidate_ids: Tensor,
    unary: Tensor,
    labels: Tensor,
    previous: Tensor,
    weights: Tensor,
    *,
    expected_weight: float = 0.0,
    processes: Processes = ALONE,
) -> Tensor:
    """Weighted mean over slots of the selector's cross-entropy over the candidates, a scalar.

    ``hidden`` [N, K, H] (final norm); ``candidate_ids`` target ids [N, K, C] and their logits ``unary`` [N, K, C];
    ``labels`` int64 [N, K] and ``previous`` int64 [N, K], the TRUE token of each slot and the true one before it, both
    target ids, ``IGNORED`` where unknown; ``weights`` fp32 [K]. A slot whose true token is no candidate is left out.
    ``expected_weight`` times ``unexpected`` of the walk is added.
    """
    log_q = F.log_softmax(move_scores(selector, hidden, previous.clamp_min(0), candidate_ids, unary), dim=-1)
    true = candidate_ids == labels[..., None]
    picked, known = torch.where(true, log_q, torch.zeros_like(log_q)).sum(-1), true.any(-1)
    loss = _weighted_mean(-picked, weights * known, processes)
    return loss + expected_weight * unexpected(picked, known, processes) if expected_weight else loss


def at_least_fp32(values: Tensor) -> Tensor:
    """Any shape, in fp32, or in fp64 where it is so."""
    return values if values.dtype == torch.float64 else values.float()


def _weighted_mean(per_slot: Tensor, weights: Tensor, processes: Processes) -> Tensor:
    return (per_slot * weights).sum() * processes.count / processes.total(weights.sum()).clamp_min(1.0)
