"""What the audit observes on vLLM's V2 runner: wrappers, each of which calls the engine's own and notes a fact.

The speculator's inputs are noted as soon as the engine has laid them out: further passes of D-Loop write the tokens
chosen so far into the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dflash_plugins.audit import choices
from dflash_plugins.hooks import Patches
from vllm_ext.audit_watch import DrafterInputs, Rows, Watch, Watches, in_slots, wrapped
from vllm_ext.hooks import DRAFTER_ARGUMENTS

Shipped = Callable[..., Any]


def refusals(config: Any) -> list[str]:
    """What of this run the audit does not follow, a sentence each."""
    parallel, speculation = config.parallel_config, config.speculative_config
    found = {
        "decode context parallelism spreads a request's rows over ranks": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism spreads a request's rows over ranks": parallel.prefill_context_parallel_size > 1,
        "batch-sharded sampling spreads requests over ranks": parallel.enable_batch_sharded_sampling,
        "adaptive verification settles on the device what is verified": speculation.enable_adaptive_verification,
    }
    return [sentence for sentence, holds in found.items() if holds]


@dataclass(frozen=True)
class Judged:
    """The target's rows of one request: its choices, whether what was emitted there had a chance, and what was drafted.

    ``q`` and ``instead``, (p, q) of what was emitted, per proposal; None where proposals count as one-hot.
    """

    choices: list[int]
    allowed: list[bool]
    drafted: list[int] = field(default_factory=list)
    q: list[float] | None = None
    instead: list[tuple[float, float]] | None = None


class WatchV2(Watch):
    """One V2 runner."""

    def __init__(self, runner: Any) -> None:
        speculator = runner.speculator
        super().__init__(runner.vllm_config, speculator.parallel_drafting_token_id, speculator.max_model_len)
        self.width = speculator.num_query_per_req
        self.states: Tensor | None = None
        self._judged: list[Judged] = []

    def prepare(self, batch: Any) -> None:
        """The rows of the target forward, as they stand in the buffers that the target reads."""
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        counts, total = (starts[1:] - starts[:-1]).tolist(), int(starts[-1])
        drafted = batch.num_draft_tokens_per_req
        self.states, self._judged = batch.idx_mapping, []
        self.rows = Rows(
            names=list(batch.req_ids),
            counts=counts,
            proposals=[0] * len(counts) if drafted is None else drafted.tolist(),
            positions=batch.positions[:total].tolist(),
            ids=batch.input_ids[:total].tolist(),
        )

    def plain(self, sampled: Tensor, logits: Tensor) -> None:
        """A step without proposals: what was sampled [R] from ``logits`` [R, V]."""
        self._judged = [Judged([choice], [allowed]) for choice, allowed in zip(*choices(logits, sampled), strict=True)]

    def verified(
        self, sampled: Tensor, logits: Tensor, drafted: Tensor, ends: Tensor, q: Tensor | None, *, by_block: bool
    ) -> None:
        """Some of the step's requests: what was sampled [R, K + 1] from logits [N, V], ``ends`` [R + 1] between them.

        ``drafted`` [N]: each row's own token, so that a request's first one is no proposal. ``q`` [N, V] likewise, of
        the proposal that a row decides; None where it is one-hot. Verified ``by_block``, a correction may have p < q.
        """
        first = ends.tolist()
        emitted = in_slots(sampled, [end - start for start, end in pairwise(first)])
        emitted = emitted.long().clamp(0, logits.shape[1] - 1)
        chosen, allowed = choices(logits, emitted)
        own = drafted.tolist()
        chances = None if q is None else _chances(logits, q, drafted, emitted)
        for start, end in pairwise(first):
            here, slots = slice(start, end), slice(start, end - 1)
            self._judged.append(
                Judged(
                    choices=chosen[here],
                    allowed=allowed[here],
                    drafted=own[start + 1 : end],
                    q=None if chances is None else chances[0][slots],
                    instead=None if chances is None or by_block else chances[1][slots],
                )
            )

    def sampled(self, output: Any) -> None:
        """See ``Watch``. Of what was sampled [R, ...] the first ``counts`` [R] are emitted; 0 for a chunk."""
        assert self.rows is not None
        sampler_output, counts, _ = output
        ids = sampler_output.sampled_token_ids
        self.rows.emitted = [
            row[:count] if count else None for row, count in zip(ids.tolist(), counts.tolist(), strict=True)
        ]

    def proposed(self, request: int, ids: list[int]) -> list[int]:
        """See ``Watch``. Where the engine fills up, it does so behind the target's back."""
        drafted = self._judged[request].drafted
        return [*ids[: len(ids) - len(drafted)], *drafted]

    def judged(self, request: int, emitted: int, greedy: bool) -> dict[str, Any]:
        """See ``Watch``."""
        found = self._judged[request]
        if greedy:
            return {"choices": found.choices}
        seen: dict[str, Any] = {"allowed": found.allowed[:emitted], "q": found.q}
        if found.instead is not None and emitted <= len(found.instead):
            seen["correction"] = found.instead[emitted - 1]
        return seen

    def draft(self, named: dict[str, Any]) -> None:
        """The inputs of the drafter, as ``prepare_dflash_inputs`` has laid them out; by its arguments' names."""
        assert self.rows is not None
        batch, buffers, limit = named["input_batch"], named["input_buffers"], named["max_model_len"]
        requests, width = batch.num_reqs, named["num_query_per_req"]
        starts = batch.query_start_loc_np[: requests + 1].tolist()
        blocks, lengths = requests * width, buffers.seq_lens[:requests].tolist()
        alone = named["cp_size"] == 1
        self.rows.inputs = DrafterInputs(
            starts=starts,
            rejected=named["num_rejected"][:requests].tolist(),
            positions=named["context_positions"][: starts[-1]].tolist(),
            slots=named["context_slot_mapping"][: starts[-1]].tolist(),
            table=named["block_table"] if alone else None,
            page=named["block_size"],
            context=[None if length == limit else length - width for length in lengths],
            block_positions=buffers.positions[:blocks].view(requests, width).tolist(),
            block_ids=buffers.input_ids[:blocks].view(requests, width).tolist(),
            skips_page_0=True,
        )

    def drafted(self, runner: Any) -> None:
        """What the runner keeps for the next step."""
        assert self.rows is not None
        assert self.states is not None
        self.rows.drafts = runner.req_states.draft_tokens[self.states].tolist()


def _chances(
    logits: Tensor, q: Tensor, drafted: Tensor, emitted: Tensor
) -> tuple[list[float], list[tuple[float, float]]]:
    """Per row [N]: q of the token that the next row brought, which this row decides; (p, q) of what was emitted."""
    p = logits.softmax(dim=-1, dtype=torch.float32)
    of_next = q.gather(1, drafted.roll(-1).long().clamp(min=0)[:, None])[:, 0]
    p_emitted, q_emitted = (each.gather(1, emitted[:, None].clamp(max=each.shape[1] - 1))[:, 0] for each in (p, q))
    return of_next.tolist(), list(zip(p_emitted.tolist(), q_emitted.tolist(), strict=True))


# Only the last rank of a pipeline drafts.
_watches = Watches(lambda runner: None if runner.speculator is None else WatchV2(runner))


def wrap(patches: Patches) -> None:
    """Put the wrappers around the runner, the samplers and the speculator, all of them through ``patches``."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    for owner, name, wrapper in (
        (GPUModelRunner, "execute_model", _execute_model),
        (GPUModelRunner, "prepare_inputs", _prepare_inputs),
        (GPUModelRunner, "sample", _watches.sample),
        (GPUModelRunner, "sample_tokens", _watches.sample_tokens),
        (Sampler, "sample", _sampler_sample),
        (rejection_sampler, "rejection_sample", _rejection_sample),
        (speculator, "prepare_dflash_inputs", _prepare_dflash_inputs),
    ):
        patches.attribute(owner, name, wrapped(getattr(owner, name), wrapper))


def _execute_model(
    shipped: Shipped,
    runner: Any,
    scheduler_output: Any,
    tensors: Any = None,
    dummy_run: bool = False,
    *rest: Any,
    **named: Any,
) -> Any:
    watch = None if dummy_run else _watches.of(runner)
    if watch is not None:
        watch.schedule(scheduler_output)
    return shipped(runner, scheduler_output, tensors, dummy_run, *rest, **named)


def _prepare_inputs(shipped: Shipped, runner: Any, *args: Any, **named: Any) -> Any:
    batch = shipped(runner, *args, **named)
    watch = _watches.of(runner)
    if watch is not None:
        watch.prepare(batch)
    return batch


def _sampler_sample(shipped: Shipped, sampler: Any, *args: Any, **named: Any) -> Any:
    sampled, logits = shipped(sampler, *args, **named)
    watch = _watches.running
    if watch is not None and watch.sampling:
        watch.plain(sampled.long(), logits)
    return sampled, logits


def _rejection_sample(
    shipped: Shipped,
    logits: Tensor,
    draft_logits: Tensor | None,
    drafted: Tensor,
    ends: Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    result = shipped(logits, draft_logits, drafted, ends, *rest, **named)
    watch = _watches.running
    if watch is not None and watch.sampling:
        q = None if draft_logits is None else realised_q(draft_logits, rest[2], rest[3], rest[4])
        watch.verified(result[0], logits, drafted, ends, q, by_block=named.get("use_block_verification", False))
    return result


def realised_q(draft_logits: Tensor, states: Tensor, places: Tensor, temperature: Tensor) -> Tensor:
    """q [N, V] of the proposal that each row decides, from the scores kept of it [S, K, V] before its temperature [S].

    ``states``, ``places`` [N]: the request and the slot of a row; the last row of a request decides none and has any q.
    """
    states = states.long()
    heat = temperature[states]
    heat = torch.where(heat > 0, heat, 1.0)
    scores = draft_logits[states, places.long().clamp(max=draft_logits.shape[1] - 1)].float()
    return (scores / heat[:, None]).softmax(dim=-1)


def _prepare_dflash_inputs(shipped: Shipped, *args: Any, **named: Any) -> Any:
    result = shipped(*args, **named)
    watch = _watches.running
    if watch is not None and watch.rows is not None:
        watch.draft(dict(zip(DRAFTER_ARGUMENTS, args, strict=False)) | named)
    return result
