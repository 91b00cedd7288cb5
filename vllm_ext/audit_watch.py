"""What the audits of both runners share: following requests through the scheduler's steps, and telling rows apart.

Everything is read where the engine itself reads it, after the step that wrote it. Reading waits for the device, which
is the price of an audited run.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dflash_plugins.audit import PLACEHOLDER, Drafting, RequestAudit, Seen, Served, rank_suffix
from dflash_plugins.sampling import GREEDY_BELOW
from vllm_ext import audit
from vllm_ext.audit import logger
from vllm_ext.runner import draft_architectures, is_ours


@dataclass(frozen=True)
class DrafterInputs:
    """The drafter's inputs of one step, of all requests: ``starts`` [R + 1] divides the context rows [N] among them.

    ``table``: pages of each request, None where slots are not to be compared; a page 0 is nobody's and takes no row
    where ``skips_page_0``. ``context`` holds None where the engine has capped it.
    """

    starts: list[int]
    rejected: list[int]
    positions: list[int]
    slots: list[int]
    table: Tensor | None
    page: int
    context: Sequence[int | None]
    block_positions: list[list[int]]
    block_ids: list[list[int]]
    skips_page_0: bool = False

    def of(self, request: int) -> Drafting:
        """Those of one request, by its row."""
        first, end = self.starts[request], self.starts[request + 1]
        kept = end - first - self.rejected[request]
        positions = self.positions[first:end]
        return Drafting(
            positions=positions,
            kept=kept,
            context=self.context[request],
            block_positions=self.block_positions[request],
            block_ids=self.block_ids[request],
            slots=self._slots(request, first, positions[:kept]),
        )

    def _slots(self, request: int, first: int, positions: list[int]) -> tuple[list[int], list[int]]:
        if self.table is None:
            return [], []
        pages, size = self.table[request].tolist(), self.page
        by_table = [
            PLACEHOLDER
            if self.skips_page_0 and not pages[place // size]
            else pages[place // size] * size + place % size
            for place in positions
        ]
        return self.slots[first : first + len(positions)], by_table


@dataclass
class Rows:
    """Observed in one step, before any of it is told apart by request; ``positions`` and ``ids`` go by ``counts``."""

    names: list[str]
    counts: list[int]
    proposals: list[int]
    positions: list[int]
    ids: list[int]
    emitted: list[list[int] | None] | None = None
    inputs: DrafterInputs | None = None
    drafts: list[list[int]] = field(default_factory=list)


class Watch(ABC):
    """One runner, followed step by step."""

    def __init__(self, config: Any, mask_token_id: int, limit: int | None = None) -> None:
        k, vocab = config.speculative_config.num_speculative_tokens, config.model_config.get_vocab_size()
        self.served = Served(k, vocab, mask_token_id, limit)
        self.report = audit.report(file_suffix(config))
        self.requests: dict[str, RequestAudit] = {}
        self.rows: Rows | None = None
        self.sampling = False

    def schedule(self, output: Any) -> None:
        """Requests that come, come back, sit out or go with this step."""
        self.rows = None
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._admit(new)
        cached = output.scheduled_cached_reqs
        for name, hit in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids and name in self.requests:
                self.requests[name].resume(cached.all_token_ids.get(name), hit)
        for name, request in self.requests.items():
            if name not in output.num_scheduled_tokens:
                request.skip()

    def _admit(self, new: Any) -> None:
        # The V2 runner forgets a preempted request and gets it again as a new one, with all its tokens.
        name, all_ids = new.req_id, new.prefill_token_ids
        ids, known = all_ids or new.prompt_token_ids, self.requests.get(name)
        if known is not None and all_ids and all_ids == known.ids[: len(all_ids)]:
            known.resume(all_ids, new.num_computed_tokens)
            return
        if ids is None or new.sampling_params is None:
            self.requests.pop(name, None)
            self.report.counts.unaudited += 1
            logger.warning("dflash-plugins: request %s has no prompt of token ids and is not audited", name)
            return
        self.report.counts.requests += 1
        greedy = new.sampling_params.temperature < GREEDY_BELOW
        self.requests[name] = RequestAudit(ids, self.served, greedy=greedy, hit=new.num_computed_tokens)

    @abstractmethod
    def sampled(self, output: Any) -> None:
        """What the step emits, as the runner's method that samples gives it back."""

    @abstractmethod
    def judged(self, request: int, emitted: int, greedy: bool) -> dict[str, Any]:
        """Fields of ``Seen`` that say how the target's rows judge what was emitted, ``emitted`` tokens."""

    def proposed(self, request: int, ids: list[int]) -> list[int]:
        """Ids of a request's rows, the proposals among them as the rejection sampler takes them."""
        return ids

    def finish(self) -> None:
        """Compare everything of this step, request by request."""
        rows = self.rows
        if rows is None or rows.emitted is None:
            return
        first = 0
        for index, (name, count) in enumerate(zip(rows.names, rows.counts, strict=True)):
            here = slice(first, first + count)
            first += count
            request, emitted = self.requests.get(name), rows.emitted[index]
            if request is None:
                continue
            seen = Seen(
                positions=rows.positions[here],
                ids=self.proposed(index, rows.ids[here]),
                proposals=rows.proposals[index],
                emitted=emitted,
                drafting=None if rows.inputs is None else rows.inputs.of(index),
                drafts=without_filling(rows.drafts[index]) if rows.drafts else (),
                **({} if emitted is None else self.judged(index, len(emitted), request.greedy)),
            )
            self.report.step(name, request, seen)
        self.rows = None
        self.report.flush()


def without_filling(row: Sequence[int]) -> list[int]:
    """Ids of one row of the engine's; what it fills rows up with is -1 and stands at the end."""
    end = len(row)
    while end and row[end - 1] == PLACEHOLDER:
        end -= 1
    return list(row[:end])


def in_slots(emitted: Tensor, counts: Sequence[int]) -> Tensor:
    """What was emitted [R, S] in the first ``counts`` slots of each request, request by request: [N]."""
    slots = [(request, slot) for request, count in enumerate(counts) for slot in range(count)]
    index = torch.tensor(slots, dtype=torch.long, device=emitted.device).view(-1, 2)
    return emitted[index[:, 0], index[:, 1]]


def file_suffix(config: Any) -> str:
    """What tells this rank's file from the others'."""
    parallel = config.parallel_config
    replica = f".replica{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
    return replica + rank_suffix()


class Watches:
    """The watch of each runner of this process that drafts with one of ours, and the one that is sampling now."""

    def __init__(self, make: Callable[[Any], Watch | None]) -> None:
        self._make = make
        self._of: WeakKeyDictionary[Any, Watch | None] = WeakKeyDictionary()
        self.running: Any = None

    def of(self, runner: Any) -> Any:
        """The runner's watch, made at its first step; None where it drafts with none of ours."""
        if runner not in self._of:
            self._of[runner] = self._make(runner) if is_ours(draft_architectures(runner.vllm_config)) else None
        return self._of[runner]

    def sample(self, shipped: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the engine's method that samples, within ``sample_tokens``: the target's logits count from here on."""
        watch = self.running
        if watch is None or watch.rows is None:
            return shipped(runner, *args, **kwargs)
        watch.sampling = True
        try:
            output = shipped(runner, *args, **kwargs)
        finally:
            watch.sampling = False
        watch.sampled(output)
        return output

    def sample_tokens(self, shipped: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the engine's method of that name: the end of a step, at which everything of it has been seen."""
        self.running = self.of(runner)
        try:
            output = shipped(runner, *args, **kwargs)
            if self.running is not None and self.running.rows is not None:
                self.running.drafted(runner)
                self.running.finish()
        finally:
            self.running = None
        return output


def wrapped(shipped: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """``wrapper`` called with ``shipped`` before its arguments."""

    @functools.wraps(shipped)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(shipped, *args, **kwargs)

    return call
