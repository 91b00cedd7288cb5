"""What the audit observes on vLLM's V1 runner: seven wrappers, each of which calls the engine's own and notes a fact.

All of it is read where the engine itself reads it, after the step that wrote it. Reading waits for the device, which is
the price of an audited run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vllm_ext import audit
from vllm_ext.audit import Drafting, RequestAudit, Seen, Served, logger
from vllm_ext.hooks import Patches
from vllm_ext.runner import draft_architectures, is_ours

_GREEDY_BELOW = 1e-5  # as the engine has it


@dataclass
class Rows:
    """Observed in one step, before any of it is told apart by request."""

    names: list[str]
    counts: list[int]
    proposals: list[int]
    positions: list[int]
    ids: list[int]
    discarded: list[bool]
    bonus: Tensor | None = None
    target: dict[str, Any] | None = None
    emitted: Tensor | None = None
    drafting: dict[str, Any] | None = None
    drafts: list[list[int]] = field(default_factory=list)


class Watch:
    """One runner, followed step by step."""

    def __init__(self, runner: Any) -> None:
        proposer, config = runner.drafter, runner.vllm_config
        k = config.speculative_config.num_speculative_tokens
        vocab = runner.model_config.get_vocab_size()
        self.served = Served(k, vocab, proposer.parallel_drafting_token_id)
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
        if new.prompt_token_ids is None or new.sampling_params is None:
            self.report.counts.unaudited += 1
            logger.warning("dflash-plugins: request %s has no prompt of token ids and is not audited", new.req_id)
            return
        self.report.counts.requests += 1
        greedy = new.sampling_params.temperature < _GREEDY_BELOW
        request = RequestAudit(new.prompt_token_ids, self.served, greedy=greedy, hit=new.num_computed_tokens)
        self.requests[new.req_id] = request

    def prepare(self, runner: Any, output: Any, metadata: Any) -> None:
        """The rows of the target forward, as they stand in the buffers that the target reads."""
        names = list(runner.input_batch.req_ids[: runner.input_batch.num_reqs])
        total = output.total_num_scheduled_tokens
        self.rows = Rows(
            names=names,
            counts=[output.num_scheduled_tokens[name] for name in names],
            proposals=[0] * len(names) if metadata is None else list(metadata.num_draft_tokens),
            positions=runner.positions[:total].tolist(),
            ids=runner.input_ids.gpu[:total].tolist(),
            discarded=runner.discard_request_mask.np[: len(names)].tolist(),
        )

    @contextmanager
    def while_sampling(self) -> Iterator[None]:
        """Logits that pass through the engine's samplers meanwhile are the target's."""
        self.sampling = True
        try:
            yield
        finally:
            self.sampling = False

    def draft(self, proposer: Any, cad: Any, rejected: Tensor | None, context: Any) -> None:
        """The inputs of the drafter, as they stand in its buffers; ``context`` is what its attention will read by."""
        width = 1 + proposer.num_speculative_tokens
        starts = cad.query_start_loc.tolist()
        rows, requests = starts[-1], len(starts) - 1
        if self.rows is None:
            return
        self.rows.drafting = {
            "starts": starts,
            "rejected": [0] * requests if rejected is None else rejected.tolist(),
            "positions": proposer._context_positions_buffer[:rows].tolist(),
            "slots": proposer._context_slot_mapping_buffer[:rows].tolist(),
            "table": cad.block_table_tensor,
            "page": proposer.block_size,
            "context": (context.seq_lens[:requests] - width).tolist(),
            "block_positions": proposer.positions[: requests * width].view(-1, width).tolist(),
            "block_ids": proposer.input_ids[: requests * width].view(-1, width).tolist(),
        }

    def finish(self) -> None:
        """Compare everything of this step, request by request."""
        rows, self.rows = self.rows, None
        if rows is None or rows.emitted is None:
            return
        emitted = rows.emitted.tolist()
        verified = judged(rows)
        first = 0
        for index, (name, count) in enumerate(zip(rows.names, rows.counts, strict=True)):
            request, here = self.requests.get(name), slice(first, first + count)
            first += count
            if request is None:
                continue
            ids = None if rows.discarded[index] else kept(emitted[index])
            seen = Seen(
                positions=rows.positions[here],
                ids=rows.ids[here],
                proposals=rows.proposals[index],
                emitted=ids,
                drafting=self._drafting(rows, index),
                drafts=rows.drafts[index] if index < len(rows.drafts) else (),
                **({} if ids is None else verified(index, len(ids), request.greedy)),
            )
            self.report.step(name, request, seen)
        self.report.flush()

    @staticmethod
    def _drafting(rows: Rows, index: int) -> Drafting | None:
        if rows.drafting is None:
            return None
        noted, page = rows.drafting, rows.drafting["page"]
        first, end = noted["starts"][index], noted["starts"][index + 1]
        positions, count = noted["positions"][first:end], end - first - noted["rejected"][index]
        blocks = noted["table"][index].tolist()
        by_table = [blocks[place // page] * page + place % page for place in positions[:count]]
        return Drafting(
            positions=positions,
            kept=count,
            context=noted["context"][index],
            block_positions=noted["block_positions"][index],
            block_ids=noted["block_ids"][index],
            slots=(noted["slots"][first : first + count], by_table),
        )


def kept(row: Sequence[int]) -> list[int]:
    """Ids of one row of the engine's output; what it rejected is -1 and stands at the end."""
    end = len(row)
    while end and row[end - 1] == -1:
        end -= 1
    return list(row[:end])


Judge = Callable[[int, int, bool], dict[str, Any]]


def judged(rows: Rows) -> Judge:
    """How the target's rows judge what was emitted: fields of ``Seen`` for ``(request, emitted, greedy)``.

    A choice that ties with the emitted token counts as the emitted token.
    """
    assert rows.emitted is not None
    emitted, proposals = rows.emitted.long().clamp(min=0), torch.tensor(rows.proposals)
    starts = [0, *proposals.cumsum(0).tolist()]
    target = rows.target
    choices, allowed = ([], []) if target is None else _choices(target["logits"], _in_slots(emitted, rows.proposals))
    last = emitted.gather(1, proposals.to(emitted.device).clamp(max=emitted.shape[1] - 1)[:, None])[:, 0]
    bonus, bonus_allowed = ([], []) if rows.bonus is None else _choices(rows.bonus, last)
    chances = None if rows.target is None else _chances(rows.target, rows.proposals, emitted)

    def judge(request: int, count: int, greedy: bool) -> dict[str, Any]:
        here = slice(starts[request], starts[request + 1])
        if greedy:
            return {"choices": [*choices[here], bonus[request]]}
        seen: dict[str, Any] = {"allowed": [*allowed[here], bonus_allowed[request]][:count]}
        if chances is not None:
            q, p_emitted, q_emitted = chances
            seen["q"] = q[here]
            slot = starts[request] + count - 1
            if count and slot < starts[request + 1]:
                seen["correction"] = (p_emitted[slot], q_emitted[slot])
        return seen

    return judge


def _in_slots(emitted: Tensor, proposals: list[int]) -> Tensor:
    """What was emitted [R, K + 1] in the slots of the proposals, request by request: [N]."""
    slots = [(request, slot) for request, count in enumerate(proposals) for slot in range(count)]
    index = torch.tensor(slots, dtype=torch.long, device=emitted.device).view(-1, 2)
    return emitted[index[:, 0], index[:, 1]]


def _choices(logits: Tensor, emitted: Tensor) -> tuple[list[int], list[bool]]:
    """Per row of logits [N, V]: the choice, which is the emitted id [N] if that ties, and whether that has a chance."""
    of_emitted = logits.gather(1, emitted[:, None])[:, 0]
    best = logits.max(dim=1)
    choice = torch.where(of_emitted == best.values, emitted, best.indices)
    return choice.tolist(), (of_emitted > -torch.inf).tolist()


def _chances(
    target: dict[str, Any], proposals: list[int], emitted: Tensor
) -> tuple[list[float], list[float], list[float]] | None:
    """Per proposal [N]: its q, and p and q of what was emitted in its slot; None where every q is one-hot."""
    q, drafted = target["q"], target["drafted"]
    if q is None:
        return None
    ids = _in_slots(emitted, proposals)[:, None]
    p = target["logits"].softmax(dim=-1, dtype=torch.float32)
    of_drafts = q.gather(1, drafted.long().clamp(min=0)[:, None])[:, 0]
    return of_drafts.tolist(), p.gather(1, ids)[:, 0].tolist(), q.gather(1, ids)[:, 0].tolist()


def file_suffix(config: Any) -> str:
    """What tells this rank's file from the others'."""
    parallel = config.parallel_config
    replica = f".replica{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return replica if alone else f"{replica}.rank{torch.distributed.get_rank()}"


_watches: WeakKeyDictionary[Any, Watch | None] = WeakKeyDictionary()
_running: Watch | None = None


def watch_of(runner: Any) -> Watch | None:
    """The runner's watch; None where it drafts with none of ours."""
    if runner not in _watches:
        ours = is_ours(draft_architectures(runner.vllm_config))
        _watches[runner] = Watch(runner) if ours and hasattr(runner, "drafter") else None
    return _watches[runner]


def wrap(patches: Patches) -> None:
    """Put the wrappers around the runner, the samplers and the proposer, all of them through ``patches``."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    around = {
        "_update_states": _update_states, "_prepare_inputs": _prepare_inputs, "_sample": _sample,
        "_copy_draft_token_ids_to_cpu": _copy_draft_token_ids_to_cpu, "sample_tokens": _sample_tokens,
    }  # fmt: skip
    for name, wrapper in around.items():
        patches.attribute(GPUModelRunner, name, _wrapped(getattr(GPUModelRunner, name), wrapper))
    patches.attribute(Sampler, "sample", _wrapped(Sampler.sample, _sampler_sample))
    patches.attribute(
        rejection_sampler, "rejection_sample", _wrapped(rejection_sampler.rejection_sample, _rejection_sample)
    )
    inputs = "set_inputs_first_pass"
    patches.attribute(DFlashProposer, inputs, _wrapped(getattr(DFlashProposer, inputs), _set_inputs_first_pass))


def _wrapped(shipped: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(shipped)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(shipped, *args, **kwargs)

    return call


def _update_states(shipped: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    watch = watch_of(runner)
    if watch is not None:
        watch.schedule(scheduler_output)
    return shipped(runner, scheduler_output)


def _prepare_inputs(shipped: Callable[..., Any], runner: Any, scheduler_output: Any, *rest: Any) -> Any:
    prepared = shipped(runner, scheduler_output, *rest)
    watch = watch_of(runner)
    if watch is not None:
        watch.prepare(runner, scheduler_output, prepared[1])
    return prepared


def _sample_tokens(shipped: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    global _running
    watch = _running = watch_of(runner)
    try:
        output = shipped(runner, *args, **kwargs)
    finally:
        _running = None
    if watch is not None:
        watch.finish()
    return output


def _sample(shipped: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    if _running is None or _running.rows is None:
        return shipped(runner, *args, **kwargs)
    with _running.while_sampling():
        output = shipped(runner, *args, **kwargs)
    _running.rows.emitted = output.sampled_token_ids
    return output


def _copy_draft_token_ids_to_cpu(shipped: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    if _running is not None and _running.rows is not None:
        drafts = runner._draft_token_ids
        _running.rows.drafts = drafts.tolist() if torch.is_tensor(drafts) else drafts
    return shipped(runner, *args, **kwargs)


def _sampler_sample(shipped: Callable[..., Any], sampler: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _running is not None and _running.rows is not None and _running.sampling:
        _running.rows.bonus = logits.clone()  # the engine goes on to scale and mask it in place
    return shipped(sampler, logits, *args, **kwargs)


def _rejection_sample(
    shipped: Callable[..., Any],
    drafted: Tensor,
    num_drafted: Any,
    most: Any,
    cumulated: Any,
    q: Tensor | None,
    logits: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _running is not None and _running.rows is not None and _running.sampling:
        _running.rows.target = {"logits": logits, "drafted": drafted, "q": q}
    return shipped(drafted, num_drafted, most, cumulated, q, logits, *args, **kwargs)


def _set_inputs_first_pass(shipped: Callable[..., Any], proposer: Any, **named: Any) -> Any:
    prepared = shipped(proposer, **named)
    if _running is not None:
        _running.draft(proposer, named["cad"], named["num_rejected_tokens_gpu"], prepared[2])
    return prepared
