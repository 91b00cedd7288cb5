"""Batched acceptance of proposals, greedy and sampled (methods.md section 6).

Shapes: R requests, K slots, V target vocabulary. Row i of the target is the row that decides slot i; row `length` gives
the bonus of a request with `length` proposals. Everything with tensors is free of host synchronisation, of loops over
requests or tokens and of shapes that depend on values: it runs under FakeTensorMode and in a CUDA graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_plugins.proposals import PADDING, Proposals
from dflash_plugins.sampling import SamplingRule, draw, target_choices, target_probs


@dataclass(frozen=True)
class Verdict:
    """What a round came to.

    accepted     [R] int64, proposals kept
    emitted_ids  [R, K + 1] int64: the accepted, then the correction or bonus, then PADDING
    emitted      [R] int64, always accepted + 1
    dropped      [R] bool: the draft was not finite and nothing of it was considered
    """

    accepted: Tensor
    emitted_ids: Tensor
    emitted: Tensor
    dropped: Tensor

    def lists(self) -> list[list[int]]:
        """Emitted tokens per request, without padding. Synchronises with the device."""
        return [ids[:count] for ids, count in zip(self.emitted_ids.tolist(), self.emitted.tolist(), strict=True)]


@dataclass(frozen=True)
class Uniforms:
    """Random numbers in [0, 1) of one round: `accept` [R, K] and `resample` [R], fp64 from `Streams`."""

    accept: Tensor
    resample: Tensor


class Streams:
    """Three independent random streams (drafting, accepting, resampling) derived from a seed.

    One seed serves the whole batch; a sequence of seeds gives each request its own streams, so that its text does not
    depend on its neighbours. In a CUDA graph draw the `Uniforms` before the graph and pass those.
    """

    PURPOSES = ("draft", "accept", "resample")

    def __init__(self, seed: int | Sequence[int], device: torch.device | str = "cpu") -> None:
        seeds = [seed] if isinstance(seed, int) else list(seed)
        self.per_request = not isinstance(seed, int)
        self.device = torch.device(device)
        self._generators = {
            purpose: [torch.Generator(self.device).manual_seed(derived_seed(one, purpose)) for one in seeds]
            for purpose in self.PURPOSES
        }

    def uniforms(self, purpose: str, *shape: int) -> Tensor:
        """fp64 uniforms in [0, 1) of shape [R, ...] from one of PURPOSES."""
        generators = self._generators[purpose]
        if not self.per_request:
            return torch.rand(shape, generator=generators[0], dtype=torch.float64, device=self.device)
        if shape[0] != len(generators):
            raise ValueError(f"{len(generators)} requests have streams, {shape[0]} were asked for")
        rows = [torch.rand(shape[1:], generator=g, dtype=torch.float64, device=self.device) for g in generators]
        return torch.stack(rows)

    def of_round(self, requests: int, slots: int) -> Uniforms:
        """The numbers that verification of one round needs."""
        return Uniforms(self.uniforms("accept", requests, slots), self.uniforms("resample", requests))


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose: unrelated for different purposes, also when seeds are consecutive."""
    digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def verify_greedy(proposals: Proposals, target_choices: Tensor) -> Verdict:
    """Longest prefix equal to the target's argmax, then the target's own token.

    `target_choices` [R, K + 1] int64. Positions that agree after the first mismatch do not count: their row was
    computed on a prefix that is not the emitted one.
    """
    _expect_rows(proposals, target_choices)
    agrees = proposals.ids == target_choices[:, : proposals.num_slots]
    accepted = _prefix(agrees, proposals.lengths.masked_fill(proposals.dropped, 0))
    final = target_choices.gather(1, accepted[:, None])[:, 0]
    return _verdict(proposals, accepted, final, proposals.dropped)


def verify_sampled(proposals: Proposals, target_probs: Tensor, streams: Streams | Uniforms) -> Verdict:
    """Accept proposal y with min(1, p(y)/q(y)); at the first rejection draw from [p-q]+, after a whole block from p.

    `target_probs` [R, K + 1, V] fp32, the distribution after all sampling rules (`sampling.target_probs`). A request
    whose q is not finite at one of its proposals is dropped as if it had none. Emitted tokens are distributed as p
    exactly, up to rounding of p and q themselves; comparison and inverse CDF run in fp64.
    """
    _expect_rows(proposals, target_probs)
    uniforms = streams if isinstance(streams, Uniforms) else streams.of_round(*proposals.ids.shape)
    q_of_y = proposals.q.of_proposals(proposals.ids).double()
    within = _within(proposals.lengths, proposals.num_slots)
    dropped = proposals.dropped | (within & ~q_of_y.isfinite()).any(dim=1)
    lengths = proposals.lengths.masked_fill(dropped, 0)
    p_of_y = target_probs[:, :-1].gather(2, proposals.ids.clamp(min=0)[..., None])[..., 0].double()
    accepted = _prefix(accepts(p_of_y, q_of_y, uniforms.accept), lengths)
    last = target_probs[torch.arange(len(accepted), device=accepted.device), accepted]
    final = draw(proposals.residual(last, accepted, lengths), uniforms.resample)
    return _verdict(proposals, accepted, final, dropped)


def accepts(p_of_y: Tensor, q_of_y: Tensor, uniforms: Tensor) -> Tensor:
    """Whether each proposal passes on its own: uniform < min(1, p/q), without a division. Any equal shapes -> bool.

    p == q > 0 always passes (a uniform is below 1); p == 0 never does.
    """
    return uniforms * q_of_y < p_of_y


def verify(proposals: Proposals, target_logits: Tensor, rule: SamplingRule, streams: Streams | Uniforms) -> Verdict:
    """Greedy and sampled requests of one batch together. `target_logits` [R, K + 1, V], any float dtype.

    A row at temperature 0 has a one-hot p: accepting with p/q then is comparing with the argmax, and the residual holds
    nothing but the argmax. So one path serves both; a batch known to be all greedy skips the probabilities.
    """
    if rule.all_greedy:
        return verify_greedy(proposals, target_choices(target_logits, rule, proposals))
    return verify_sampled(proposals, target_probs(target_logits, rule, proposals), streams)


def emitted_logprobs(verdict: Verdict, target_logits: Tensor) -> Tensor:
    """Log probability of each emitted token in the row that produced it, 0 at padding: [R, K + 1] fp32 (F68).

    Token i of a request always comes from row i, so the bonus or correction uses row `accepted`. `target_logits`
    [R, K + 1, V], raw or processed as the caller reports them.
    """
    logits = target_logits.float()
    chosen = logits.gather(2, verdict.emitted_ids.clamp(min=0)[..., None])[..., 0]
    return torch.where(verdict.emitted_ids == PADDING, 0.0, chosen - logits.logsumexp(dim=-1))


def verify_greedy_block(
    draft: Sequence[int], target_choices: Sequence[int], eos_token: int | Iterable[int] | None = None
) -> tuple[list[int], int]:
    """One block as lists: `(emitted, number accepted)`, stopping at an accepted end-of-text token.

    The list form of the reference document; several end-of-text ids may be given (F69). Raises ValueError unless there
    is one target choice per proposal and one for the bonus.
    """
    if len(target_choices) - len(draft) != 1:
        raise ValueError(f"{len(draft)} proposals need {len(draft) + 1} target choices, got {len(target_choices)}")
    ends = {eos_token} if isinstance(eos_token, int) else set(eos_token or ())
    pairs = zip(draft, target_choices, strict=False)
    accepted = next((slot for slot, (token, choice) in enumerate(pairs) if token != choice), len(draft))
    kept = list(draft[:accepted])
    end = next((slot for slot, token in enumerate(kept) if token in ends), None)
    if end is not None:
        return kept[: end + 1], end + 1
    return [*kept, target_choices[accepted]], accepted


def _expect_rows(proposals: Proposals, target: Tensor) -> None:
    rows, slots = proposals.ids.shape
    if target.shape[:2] != (rows, slots + 1):
        raise ValueError(
            f"{rows} requests of {slots} slots need target rows [{rows}, {slots + 1}, ...], not {list(target.shape)}"
        )


def _within(lengths: Tensor, slots: int) -> Tensor:
    """[R, slots] bool: the slot holds a proposal."""
    return torch.arange(slots, device=lengths.device) < lengths[:, None]


def _prefix(passes: Tensor, lengths: Tensor) -> Tensor:
    """Number of leading slots that pass: [R, K] bool, [R] -> [R] int64."""
    return (passes & _within(lengths, passes.shape[1])).long().cumprod(dim=1).sum(dim=1)


def _verdict(proposals: Proposals, accepted: Tensor, final: Tensor, dropped: Tensor) -> Verdict:
    padded = torch.nn.functional.pad(proposals.ids, (0, 1), value=PADDING)
    kept = padded.masked_fill(~_within(accepted, padded.shape[1]), PADDING)
    return Verdict(accepted, kept.scatter(1, accepted[:, None], final[:, None]), accepted + 1, dropped)
