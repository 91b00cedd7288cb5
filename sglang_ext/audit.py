"""The audit of SGLang: ``dflash_plugins.audit`` says what a round is compared with; here our worker is watched.

Everything is read where the engine itself reads it, after the step that wrote it. Reading waits for the device, which
is the price of an audited run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dflash_plugins.audit import (
    Drafting,
    Report,
    RequestAudit,
    Seen,
    Served,
    choices,
    rank_suffix,
    refuse,
    requested,
)
from dflash_plugins.hooks import drift
from sglang_ext import acceptance
from sglang_ext.hooks import AT_AUDIT
from sglang_ext.proposer import DFlashPluginsWorker

logger = logging.getLogger("sglang.dflash_plugins")


def require() -> None:
    """AuditRefused, which keeps the engine from starting, where the engine has changed."""
    sentences = drift(AT_AUDIT)
    if sentences:
        refuse(f"SGLang has changed: {'; '.join(sentences)}", logger)


class AuditedWorker(DFlashPluginsWorker):
    """Our worker, every round of which is derived again from the core."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        path = requested()
        assert path is not None
        facts = self.drafter.facts
        self.served = Served(self.num_proposals, int(self.model_config.vocab_size), facts.mask_token_id)
        self.report = Report(path, logger, rank_suffix())
        self.requests: WeakKeyDictionary[Any, RequestAudit] = WeakKeyDictionary()
        self._first_block: tuple[list[list[int]], list[list[int]], list[int]] | None = None
        self._verified: tuple[Tensor, Tensor, Any] | None = None
        self._appended: dict[str, Any] = {}
        self._pools: dict[Any, int] = {}

    def forward_batch_generation(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """A round, as the engine; then compared."""
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, *arguments, **options)
        extends = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        reqs, starts = list(batch.reqs), list(batch.prefix_lens) if extends else batch.seq_lens.tolist()
        self._pools = dict(zip(reqs, batch.req_pool_indices.tolist(), strict=True))
        ids = batch.input_ids.tolist() if extends else []
        result = super().forward_batch_generation(batch, *arguments, **options)
        if extends:
            self._extended(batch, reqs, starts, ids, result)
        else:
            self._decoded(batch, reqs, starts, result)
        self.report.flush()
        return result

    # What the engine's seams let by

    def _forward_and_remember(self, forward_batch: Any, *arguments: Any, **options: Any) -> Any:
        shape = (len(forward_batch.seq_lens), self.num_proposals + 1)
        self._first_block = (
            forward_batch.positions.view(shape).tolist(),
            forward_batch.input_ids.view(shape).tolist(),
            forward_batch.seq_lens.tolist(),
        )
        return super()._forward_and_remember(forward_batch, *arguments, **options)

    def _accept_block(self, *, candidates: Tensor, next_token_logits: Tensor, sampling_info: Any, **more: Any) -> Any:
        self._verified = (candidates, next_token_logits, sampling_info)
        return super()._accept_block(
            candidates=candidates, next_token_logits=next_token_logits, sampling_info=sampling_info, **more
        )

    def _append_target_hidden_to_draft_kv_by_loc(self, **given: Any) -> None:
        self._appended = given
        super()._append_target_hidden_to_draft_kv_by_loc(**given)

    # Comparing

    def _extended(self, batch: Any, reqs: list[Any], starts: list[int], ids: list[int], result: Any) -> None:
        """Prompt chunks, and rows of running requests that the engine has mixed among them."""
        tokens, logits = result.next_token_ids, result.logits_output.next_token_logits
        positions, slots = self._appended["positions"].tolist(), self._appended["cache_loc"].tolist()
        first = 0
        for row, (req, start, count) in enumerate(zip(reqs, starts, batch.extend_lens, strict=True)):
            here, first = slice(first, first + count), first + count
            one, running = self._followed(req, start, count)
            emits = running or start + count >= len(req.origin_input_ids) + len(req.output_ids)
            emitted = [int(tokens[row])] if emits else None
            choice = choices(logits[row : row + 1], tokens[row : row + 1].long())[0] if emits and one.greedy else None
            drafting = Drafting(positions[here], count, None, slots=(slots[here], self._table(req, positions[here])))
            seen = Seen(range(start, start + count), ids[here], 0, emitted, choices=choice, drafting=drafting)
            self.report.step(req.rid, one, seen)

    def _followed(self, req: Any, start: int, count: int) -> tuple[RequestAudit, bool]:
        """The request's audit, begun or begun again where it has to be; and whether it was running already."""
        ids = [*req.origin_input_ids, *req.output_ids]
        one = self.requests.get(req)
        if one is None:
            one = self.requests[req] = RequestAudit(ids, self.served, greedy=_is_greedy(req), hit=start)
            self.report.counts.requests += 1
            return one, False
        if start != one.machine.lengths.target_kv:
            one.resume(ids, start)
            return one, False
        return one, start + count == len(one.ids) and len(one.ids) > len(req.origin_input_ids)

    def _decoded(self, batch: Any, reqs: list[Any], starts: Sequence[int], result: Any) -> None:
        assert self._first_block is not None
        assert self._verified is not None
        candidates, logits, sampling = self._verified
        accepted = (result.accept_lens - 1).tolist()
        out = result.next_token_ids.view(candidates.shape)
        rows = logits.view(*candidates.shape, -1)
        probs = None if sampling is None or sampling.is_all_greedy else acceptance.target_probs(rows, sampling)
        positions, slots = self._appended["positions"].view(candidates.shape), self._appended["cache_loc_2d"]
        kept = self._appended["commit_lens"].tolist()
        for row, (req, start) in enumerate(zip(reqs, starts, strict=True)):
            one = self.requests.get(req)
            if one is None:
                self.report.counts.unaudited += 1
                continue
            ids = candidates[row].tolist()
            self.report.block(req.rid, one, self._block_of(row), ids[1:])
            emitted = out[row, : accepted[row] + 1].tolist()
            committed = positions[row, : kept[row]].tolist()
            table = self._table(req, committed)
            drafting = Drafting(
                positions[row].tolist(), kept[row], None, slots=(slots[row, : kept[row]].tolist(), table)
            )
            width = len(ids)
            judged = self._judged(row, one.greedy, rows[row], probs, emitted, ids[1:])
            seen = Seen(range(start, start + width), ids, width - 1, emitted, drafting=drafting, **judged)
            self.report.step(req.rid, one, seen)

    def _block_of(self, row: int) -> Drafting:
        assert self._first_block is not None
        positions, ids, contexts = self._first_block
        # With a window the engine shows the drafter less than it has.
        context = None if self.use_compact_draft_cache else contexts[row]
        return Drafting((), 0, context, positions[row], ids[row])

    def _judged(
        self, row: int, greedy: bool, rows: Tensor, probs: Tensor | None, emitted: list[int], proposals: list[int]
    ) -> dict[str, Any]:
        """Fields of ``Seen`` that say how the target's rows [B, V] judge what was emitted."""
        if greedy or probs is None:
            # Beyond what was emitted any id will do: of equals the first is the choice.
            padded = [*emitted, *[0] * (len(rows) - len(emitted))]
            return {"choices": choices(rows, torch.tensor(padded, device=rows.device))[0]}
        allowed = [bool(probs[row, slot, token] > 0) for slot, token in enumerate(emitted)]
        drafted = self._selector_sample
        found: dict[str, Any] = {"allowed": allowed}
        if drafted is None:
            return found
        last = len(emitted) - 1
        q = drafted.q.of_proposals(drafted.ids)[row].tolist()
        if all(chance == 1.0 for chance in q):
            return found  # one-hot
        found |= {"q": q}
        if last < len(proposals):
            slot = torch.full((len(drafted.ids),), last, device=drafted.ids.device)
            chance = drafted.q.row(drafted.ids, slot, probs.shape[-1])[row, emitted[last]]
            found |= {"correction": (float(probs[row, last, emitted[last]]), float(chance))}
        return found

    def _table(self, req: Any, positions: list[int]) -> list[int]:
        """Slots that the engine's table has for a request's positions."""
        table = self.model_runner.req_to_token_pool.req_to_token
        return [int(slot) for slot in table[self._pools[req], positions].tolist()]


def _is_greedy(req: Any) -> bool:
    return bool(req.sampling_params.top_k <= 1)
