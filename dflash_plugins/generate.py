"""The reference generator on a transformers target: slow, plain, and the oracle for every engine.

A round is drafted, verified and committed in this order for one request after the other, each with caches of its own;
only the draft is batched. ``rounds`` yields every round as it ends; ``generate`` collects them. Lengths come from
``alignment.py`` alone, randomness from three independent streams per request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_plugins.alignment import Commit, Forward, Lengths, RequestAlignment
from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.features import FeatureTap
from dflash_plugins.methods import Method, method_of
from dflash_plugins.proposals import Dense, Distribution, Proposals, Sparse
from dflash_plugins.sampling import Sampling, SamplingRule
from dflash_plugins.stopping import Reason, cut_emitted
from dflash_plugins.verify import Streams, Verdict, verify

ForcedDrafts = Callable[[int, Sequence[int]], Sequence[int]]
"""(request, its committed ids) -> at most K token ids to propose instead of the drafter's, as argmax proposals."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to generate and how.

    k                 proposals per round; 0 decodes plainly
    max_new_tokens    most tokens to emit per request
    sampling          the target's rules; temperature 0 is greedy
    draft_temperature the drafter's; None: the target's. 0 takes an argmax per slot, whatever the target does
    eos_ids, stop_ids, ignore_eos, min_new_tokens    as in ``stopping.cut_emitted``
    seed              request i draws from seed + i; a sequence gives each request its own
    chunk             most prompt rows per target forward; None: the whole prompt
    drafter_limit     positions the drafter may serve; None: its ``max_position_embeddings``
    """

    k: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    draft_temperature: float | None = None
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    seed: int | Sequence[int] = 0
    chunk: int | None = None
    drafter_limit: int | None = None

    def __post_init__(self) -> None:
        rules = {
            f"k must be at least 0, not {self.k}": self.k >= 0,
            f"max_new_tokens must be at least 1, not {self.max_new_tokens}": self.max_new_tokens >= 1,
            f"chunk must be at least 1, not {self.chunk}": self.chunk is None or self.chunk >= 1,
        }
        if not all(rules.values()):
            raise BadInput("; ".join(message for message, holds in rules.items() if not holds))

    def seed_of(self, request: int) -> int:
        """Seed of one request's streams."""
        return self.seed + request if isinstance(self.seed, int) else self.seed[request]


@dataclass(frozen=True)
class Round:
    """One target forward that emitted tokens (also the end of a prefill, which has no proposals).

    ``proposals`` as verified, after all cuts; ``accepted`` of them by the target; ``emitted`` after EOS, stop and
    length cuts; ``lengths`` after the commit; ``dropped``: the draft was not finite; ``reason``: why the request ends
    here, or None.
    """

    request: int
    proposals: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    lengths: Lengths
    dropped: bool
    reason: Reason | None


@dataclass(frozen=True)
class Generation:
    """One finished request: emitted ``ids``, its ``rounds`` in order, and why it ended."""

    ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    reason: Reason


class TargetCache:
    """Everything a transformers target remembers of one request.

    Plain attention layers are cropped by length. Any other kind (recurrent, convolution, sliding window) cannot be:
    then the state before each forward is kept, and the rows that stay are run again from it.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.config)
        self._before: DynamicCache | None = None
        self.length = 0

    @property
    def croppable(self) -> bool:
        """Whether rows can be dropped by length alone."""
        return all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Run ``ids`` after what is there; logits [1, rows, V] on the CPU. End with ``keep``, also when it raised."""
        self._before = None if self.croppable else copy.deepcopy(self._cache)
        inputs = torch.tensor([list(ids)], device=self._target.device)
        logits: Tensor = self._target(input_ids=inputs, past_key_values=self._cache, use_cache=True).logits
        return logits.cpu()

    def keep(self, kept: Sequence[int], dropped: int) -> None:
        """Of the last forward keep the rows of the ids ``kept``, and drop the ``dropped`` rows after them."""
        if dropped and self._before is not None:
            self._cache = self._before
            if kept:
                self.forward(kept)
        self._before = None
        self.length += len(kept)
        if dropped and self.croppable:
            self.crop(self.length)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens. A forward that raised half-way has filled some layers only."""
        if not self.croppable and length != self.length:
            raise BadInput(f"this target's state cannot be cropped to {length} tokens; it stands after {self.length}")
        for layer in self._cache.layers:
            if isinstance(layer, DynamicLayer) and (extra := layer.get_seq_length() - length) > 0:
                layer.crop(-extra)
        self.length = length


class ReferenceRequest:
    """One request with its own target cache, drafter context and random streams.

    ``drafter`` may be None when ``forced_drafts`` or no drafts at all are used. A bound drafter is expected.
    """

    def __init__(
        self, target: Any, drafter: Drafter | None, prompt: Sequence[int], settings: Settings, request: int = 0
    ) -> None:
        self.target, self.drafter, self.settings, self.request = target, drafter, settings, request
        self.ids = list(prompt)
        self.num_prompt = len(self.ids)
        limit = settings.drafter_limit
        if limit is None and drafter is not None:
            limit = drafter.config.max_position_embeddings
        self.alignment = RequestAlignment(
            self.num_prompt, k=settings.k, drafter_limit=limit, max_length=self.num_prompt + settings.max_new_tokens
        )
        self.cache = TargetCache(target)
        self.context: ContextKV | None = None if drafter is None else drafter.empty_context(1)
        self.streams = Streams(settings.seed_of(request))
        self.reason: Reason | None = None
        self.alignment.admit()

    def prefill(self) -> Round:
        """Run all tokens that have no K/V yet, in chunks; the last chunk emits one token."""
        while True:
            missing = self.alignment.lengths.committed - self.alignment.lengths.target_kv
            forward = self.alignment.prefill(min(missing, self.settings.chunk or missing))
            ended = self._run(forward, Proposals.of(torch.empty(1, 0, dtype=torch.int64)))
            if ended is not None:
                return ended

    def verify(self, proposals: Proposals | None = None) -> Round:
        """Verify and commit ``proposals`` of this one request (R = 1, any K slots); None decodes plainly.

        When the target raises, everything is as it was before the call, and the error goes on.
        """
        proposals = Proposals.of(torch.empty(1, 0, dtype=torch.int64)) if proposals is None else proposals
        kept = self.alignment.draft(proposals.lists()[0])
        ended = self._run(self.alignment.verify(), one_request(proposals, 0, len(kept)))
        assert ended is not None
        return ended

    def preempt(self, target_hit: int = 0, drafter_hit: int | None = None) -> None:
        """Give up the caches and come back with the given prefix hits; ``prefill`` goes on from there."""
        valid = self.alignment.preempt()
        states = None if self.cache.croppable else {valid.target_kv}
        usable = self.alignment.admit(target_hit, drafter_hit, states).usable
        if usable == 0:
            self.cache = TargetCache(self.target)
        self.cache.crop(usable)
        if self.context is not None:
            self.context = self.context.crop(torch.tensor([self.alignment.lengths.drafter_context]))

    @torch.no_grad()
    def _run(self, forward: Forward, proposals: Proposals) -> Round | None:
        """One target forward and its commit; None for a prompt chunk that emits nothing."""
        rows = [*self.ids, *proposals.lists()[0]][forward.positions.start : forward.positions.stop]
        try:
            logits, features = self._forward(rows)
            verdict = self._judge(logits[:, forward.anchor_row :], proposals) if forward.samples else None
        except Exception:
            self._follow(self.alignment.rollback(), rows, None)
            raise
        if verdict is None:
            self._follow(self.alignment.commit(), rows, features)
            return None
        accepted = int(verdict.accepted)
        emitted, self.reason = self._cut(verdict.lists()[0])
        self.ids += emitted
        self._follow(self.alignment.commit(accepted, len(emitted)), rows, features)
        lengths = self.alignment.lengths
        if self.reason is not None:
            self.alignment.finish()
        ids = tuple(proposals.lists()[0])
        return Round(self.request, ids, accepted, tuple(emitted), lengths, bool(verdict.dropped), self.reason)

    def _forward(self, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits [1, rows, V] and, for a drafter, features [1, rows, taps * Ht]."""
        if self.drafter is None:
            return self.cache.forward(rows), None
        with FeatureTap(self.target, self.drafter.config.target_layer_ids) as tap:
            logits = self.cache.forward(rows)
            return logits, tap.take()

    def _judge(self, logits: Tensor, proposals: Proposals) -> Verdict:
        settings, output = self.settings, self.ids[self.num_prompt :]
        rule = SamplingRule.of(
            [settings.sampling],
            vocab_size=logits.shape[-1],
            prompts=[self.ids[: self.num_prompt]],
            outputs=[output],
            allowed=_before_min_tokens(settings, len(output), logits),
        )
        return verify(proposals, logits, rule, self.streams)

    def _cut(self, emitted: Sequence[int]) -> tuple[list[int], Reason | None]:
        settings, done = self.settings, len(self.ids) - self.num_prompt
        return cut_emitted(
            emitted,
            max_new=settings.max_new_tokens - done,
            eos_ids=settings.eos_ids,
            stop_ids=settings.stop_ids,
            ignore_eos=settings.ignore_eos,
            min_new=settings.min_new_tokens - done,
        )

    def _follow(self, commit: Commit, rows: Sequence[int], features: Tensor | None) -> None:
        """Do to the caches what the commit says."""
        kept, written = len(commit.keep_rows), commit.context_positions
        self.cache.keep(rows[:kept], len(commit.drop_rows))
        if features is None or self.drafter is None or self.context is None or not written:
            return
        positions = torch.tensor([list(written)], device=features.device)
        new = self.drafter.context_kv(features[:, kept - len(written) : kept], positions)
        self.context = self.context.append(new)


def rounds(
    target: Any,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    method: Method | None = None,
    forced_drafts: ForcedDrafts | None = None,
) -> Iterator[Round]:
    """Generate for all ``prompts`` (lists of token ids), round by round.

    ``target``: a transformers causal LM; ``drafter``: bound to its embedding and head; ``method``: None takes the
    drafter's own. Greedy ids are those of the target alone, whatever is drafted. Raises BadInput when there is nothing
    to draft with.
    """
    if settings.k and drafter is None and forced_drafts is None:
        raise BadInput(f"k is {settings.k}, but there is no drafter: give one, or k 0 for plain decoding")
    if drafter is not None and method is None:
        method = method_of(drafter.config)
    requests = [ReferenceRequest(target, drafter, ids, settings, index) for index, ids in enumerate(prompts)]
    for request in requests:
        yield request.prefill()
    while active := [request for request in requests if request.reason is None]:
        wanting = [request for request in active if request.alignment.block().proposals]
        if forced_drafts is not None:
            drafts = [_forced(forced_drafts(request.request, request.ids)) for request in wanting]
        else:
            drafts = draft_together(wanting, method) if wanting and method else []
        proposals = {request.request: draft for request, draft in zip(wanting, drafts, strict=True)}
        for request in active:
            yield request.verify(proposals.get(request.request))


def generate(
    target: Any,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    method: Method | None = None,
    forced_drafts: ForcedDrafts | None = None,
) -> list[Generation]:
    """``rounds``, collected per request in the order of the prompts."""
    return collect(rounds(target, drafter, prompts, settings, method=method, forced_drafts=forced_drafts))


def collect(stream: Iterable[Round]) -> list[Generation]:
    """Generations of a stream that was read to its end."""
    by_request: dict[int, list[Round]] = {}
    for one in stream:
        by_request.setdefault(one.request, []).append(one)
    done = []
    for _, own in sorted(by_request.items()):
        reason = own[-1].reason
        assert reason is not None
        done.append(Generation(tuple(token for one in own for token in one.emitted), tuple(own), reason))
    return done


@torch.no_grad()
def draft_together(requests: Sequence[ReferenceRequest], method: Method) -> list[Proposals]:
    """One batched draft for requests that share drafter and settings; always K masks. One Proposals (R = 1) each."""
    drafter, settings = requests[0].drafter, requests[0].settings
    contexts = [request.context for request in requests if request.context is not None]
    if drafter is None or len(contexts) != len(requests):
        raise BadInput("these requests have no drafter")
    temperature = settings.draft_temperature
    temperature = settings.sampling.temperature if temperature is None else temperature
    device = drafter.fc.weight.device
    uniforms = None
    if temperature > 0:
        uniforms = torch.cat([request.streams.uniforms("draft", 1, settings.k) for request in requests]).to(device)
    proposals = method.draft(
        drafter,
        torch.tensor([request.ids[-1] for request in requests], device=device),
        torch.tensor([request.alignment.block().positions.start for request in requests], device=device),
        ContextKV.stack(contexts),
        settings.k,
        temperature=temperature,
        uniforms=uniforms,
    )
    return [one_request(proposals, row, settings.k) for row in range(len(requests))]


def one_request(proposals: Proposals, row: int, slots: int) -> Proposals:
    """One row of a batch with its first ``slots`` slots, as a batch of one on the CPU, where verification runs."""
    return replace(
        proposals,
        ids=proposals.ids[row : row + 1, :slots].cpu(),
        lengths=proposals.lengths[row : row + 1].clamp(max=slots).cpu(),
        q=_part(proposals.q, row, slots),
        dropped=proposals.dropped[row : row + 1].cpu(),
    )


def bind(drafter: Drafter, target: nn.Module) -> Drafter:
    """Lend a transformers target's embedding and head to ``drafter``; returns it. BadInput when they do not fit."""
    embedding, head = (getattr(target, f"get_{side}_embeddings")() for side in ("input", "output"))
    drafter.bind(embedding.weight, head.weight)
    return drafter


def _part(q: Distribution, row: int, slots: int) -> Distribution:
    here = slice(row, row + 1), slice(0, slots)
    if isinstance(q, Dense):
        return Dense(q.probs[here].cpu())
    return Sparse(q.ids[here].cpu(), q.probs[here].cpu()) if isinstance(q, Sparse) else q


def _forced(ids: Sequence[int]) -> Proposals:
    return Proposals.of(torch.tensor([list(ids)], dtype=torch.int64))


def _before_min_tokens(settings: Settings, done: int, logits: Tensor) -> Tensor | None:
    """Mask [1, rows, V] that holds back every id that would end the text too early; None when none has to be."""
    ends = {*settings.stop_ids, *(() if settings.ignore_eos else settings.eos_ids)}
    if done >= settings.min_new_tokens or not ends:
        return None
    allowed = torch.ones_like(logits, dtype=torch.bool)
    allowed[:, : settings.min_new_tokens - done, sorted(ends)] = False
    return allowed
