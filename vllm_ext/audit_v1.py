"""What the audit observes on vLLM's V1 runner: wrappers, each of which calls the engine's own and notes a fact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_plugins.audit import choices
from dflash_plugins.hooks import Patches
from vllm_ext.audit_watch import (
    DrafterInputs,
    Rows,
    Watch,
    Watches,
    in_slots,
    without_filling,
    wrapped,
)

Shipped = Callable[..., Any]


def refusals(config: Any) -> list[str]:
    """What of this run the audit does not follow, a sentence each."""
    return (
        ["decode context parallelism spreads a request's rows over ranks"]
        if config.parallel_config.decode_context_parallel_size > 1
        else []
    )


class WatchV1(Watch):
    """One V1 runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.vllm_config, runner.drafter.parallel_drafting_token_id)
        self.discarded: list[bool] = []
        self.bonus: Tensor | None = None
        self.target: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._first: list[int] = []
        self._choices: tuple[list[int], list[bool]] = [], []
        self._of_bonus: tuple[list[int], list[bool]] = [], []
        self._chances: tuple[list[float], list[float], list[float]] | None = None

    def prepare(self, runner: Any, output: Any, metadata: Any) -> None:
        """The rows of the target forward, as they stand in the buffers that the target reads."""
        names = list(runner.input_batch.req_ids[: runner.input_batch.num_reqs])
        total = output.total_num_scheduled_tokens
        self.discarded = runner.discard_request_mask.np[: len(names)].tolist()
        self.bonus, self.target = None, None
        self.rows = Rows(
            names=names,
            counts=[output.num_scheduled_tokens[name] for name in names],
            proposals=[0] * len(names) if metadata is None else list(metadata.num_draft_tokens),
            positions=runner.positions[:total].tolist(),
            ids=runner.input_ids.gpu[:total].tolist(),
        )

    def sampled(self, output: Any) -> None:
        """See ``Watch``. What the samplers made of the target's rows is [R, K + 1] or [R, 1]."""
        assert self.rows is not None
        ids = output.sampled_token_ids
        listed = zip(ids.tolist(), self.discarded, strict=True)
        self.rows.emitted = [None if discarded else without_filling(row) for row, discarded in listed]
        emitted, proposals = ids.long().clamp(min=0), self.rows.proposals
        self._first = [0, *torch.tensor(proposals).cumsum(0).tolist()]
        self._choices, self._chances = ([], []), None
        if self.target is not None:
            logits, drafted, q = self.target
            slots = in_slots(emitted, proposals)
            self._choices = choices(logits, slots)
            self._chances = None if q is None else _chances(logits, q, drafted, slots)
        if self.bonus is not None:
            last = torch.tensor(proposals, device=ids.device).clamp(max=ids.shape[1] - 1)
            self._of_bonus = choices(self.bonus, emitted.gather(1, last[:, None])[:, 0])

    def judged(self, request: int, emitted: int, greedy: bool) -> dict[str, Any]:
        """See ``Watch``."""
        here = slice(self._first[request], self._first[request + 1])
        if greedy:
            return {"choices": [*self._choices[0][here], self._of_bonus[0][request]]}
        seen: dict[str, Any] = {"allowed": [*self._choices[1][here], self._of_bonus[1][request]][:emitted]}
        if self._chances is not None:
            q, p_emitted, q_emitted = self._chances
            seen["q"], slot = q[here], here.start + emitted - 1
            if here.start <= slot < here.stop:
                seen["correction"] = (p_emitted[slot], q_emitted[slot])
        return seen

    def draft(self, proposer: Any, cad: Any, rejected: Tensor | None, context: Any) -> None:
        """The inputs of the drafter, as they stand in its buffers; ``context`` is what its attention will read by."""
        assert self.rows is not None
        width = 1 + proposer.num_speculative_tokens
        starts = cad.query_start_loc.tolist()
        rows, requests = starts[-1], len(starts) - 1
        self.rows.inputs = DrafterInputs(
            starts=starts,
            rejected=[0] * requests if rejected is None else rejected.tolist(),
            positions=proposer._context_positions_buffer[:rows].tolist(),
            slots=proposer._context_slot_mapping_buffer[:rows].tolist(),
            table=cad.block_table_tensor,
            page=proposer.block_size,
            context=(context.seq_lens[:requests] - width).tolist(),
            block_positions=proposer.positions[: requests * width].view(-1, width).tolist(),
            block_ids=proposer.input_ids[: requests * width].view(-1, width).tolist(),
        )

    def drafted(self, runner: Any) -> None:
        """What the runner keeps for the next step: drafts, zeros where it did not draft."""
        assert self.rows is not None
        drafts = runner._draft_token_ids
        self.rows.drafts = drafts.tolist() if torch.is_tensor(drafts) else drafts or []


def _chances(
    logits: Tensor, q: Tensor, drafted: Tensor, emitted: Tensor
) -> tuple[list[float], list[float], list[float]]:
    """Per proposal [N]: its q, and p and q of what was emitted in its slot. Logits and q [N, V], ids [N]."""
    p = logits.softmax(dim=-1, dtype=torch.float32)
    of_drafts = q.gather(1, drafted.long().clamp(min=0)[:, None])[:, 0]
    p_emitted, q_emitted = (each.gather(1, emitted[:, None])[:, 0] for each in (p, q))
    return of_drafts.tolist(), p_emitted.tolist(), q_emitted.tolist()


# Only the last rank of a pipeline drafts.
_watches = Watches(lambda runner: WatchV1(runner) if hasattr(runner, "drafter") else None)


def wrap(patches: Patches) -> None:
    """Put the wrappers around the runner, the samplers and the proposer, all of them through ``patches``."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for owner, name, wrapper in (
        (GPUModelRunner, "_update_states", _update_states),
        (GPUModelRunner, "_prepare_inputs", _prepare_inputs),
        (GPUModelRunner, "_sample", _watches.sample),
        (GPUModelRunner, "sample_tokens", _watches.sample_tokens),
        (Sampler, "sample", _sampler_sample),
        (rejection_sampler, "rejection_sample", _rejection_sample),
        (DFlashProposer, "set_inputs_first_pass", _set_inputs_first_pass),
    ):
        patches.attribute(owner, name, wrapped(getattr(owner, name), wrapper))


def _update_states(shipped: Shipped, runner: Any, scheduler_output: Any) -> Any:
    watch = _watches.of(runner)
    if watch is not None:
        watch.schedule(scheduler_output)
    return shipped(runner, scheduler_output)


def _prepare_inputs(shipped: Shipped, runner: Any, scheduler_output: Any, *rest: Any) -> Any:
    prepared = shipped(runner, scheduler_output, *rest)
    watch = _watches.of(runner)
    if watch is not None:
        watch.prepare(runner, scheduler_output, prepared[1])
    return prepared


def _sampler_sample(shipped: Shipped, sampler: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
    watch = _watches.running
    if watch is not None and watch.sampling:
        watch.bonus = logits.clone()  # the engine goes on to scale and mask it in place
    return shipped(sampler, logits, *args, **kwargs)


def _rejection_sample(
    shipped: Shipped,
    drafted: Tensor,
    counts: Any,
    most: Any,
    ends: Any,
    q: Tensor | None,
    logits: Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    watch = _watches.running
    if watch is not None and watch.sampling:
        watch.target = (logits, drafted, q)
    return shipped(drafted, counts, most, ends, q, logits, *rest, **named)


def _set_inputs_first_pass(shipped: Shipped, proposer: Any, **named: Any) -> Any:
    prepared = shipped(proposer, **named)
    watch = _watches.running
    if watch is not None and watch.rows is not None:
        watch.draft(proposer, named["cad"], named["num_rejected_tokens_gpu"], prepared[2])
    return prepared
