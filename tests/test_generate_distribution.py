"""Sampled generation, by enumeration: every path of draft, acceptance and resampling, with its exact probability.

The generator's own code runs every path. Its random numbers are scripted: for each choice a number just inside the
interval that should lead there. p comes from transformers alone (whole forwards, its logits processors), and all
probabilities are computed here, so what is summed shares no code with verification.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import pytest
import tiny
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from dflash_plugins.generate import ReferenceRequest, Settings, bind, draft_together
from dflash_plugins.methods import method_of
from dflash_plugins.proposals import Dense, Proposals, Sparse
from dflash_plugins.sampling import Sampling
from dflash_plugins.verify import Uniforms

VOCAB, K, TOKENS = 3, 2, 4
PROMPT = [1, 2, 2, 1, 1]  # token 0 is new, so that a penalty has something to tell apart
# The code computes p and q in fp32: closer to a boundary than this the outcome is not determined.
EDGE = 1e-5

Path = tuple[float, ReferenceRequest]


class Script:
    """Stands for the request's random streams and hands out the numbers it was given."""

    def __init__(self, *, draft: list[float] | None = None, accept: list[float] | None = None, final: float = 0.5):
        self.draft, self.accept, self.final = draft, accept, final

    def uniforms(self, purpose: str, *shape: int) -> torch.Tensor:
        assert purpose == "draft"
        assert self.draft is not None
        return torch.tensor(self.draft, dtype=torch.float64).reshape(shape)

    def of_round(self, requests: int, slots: int) -> Uniforms:
        accept = torch.tensor((self.accept or [])[:slots], dtype=torch.float64)
        return Uniforms(accept.reshape(requests, slots), torch.tensor([self.final], dtype=torch.float64))


class Enumeration:
    """All continuations of PROMPT by TOKENS tokens, with the probability the generator gives each."""

    def __init__(self, method: str, sampling: Sampling, draft_temperature: float | None) -> None:
        loop = {"dloop": {"mode": "refine", "prefix_lengths": [1]}} if method == "dloop" else {}
        raw = tiny.smallest(
            method,
            draft={"mask_token_id": 2, "target_layer_ids": [0, 1]} | loop,
            vocab_size=VOCAB,
            block_size=K + 1,
            num_target_layers=2,
            num_hidden_layers=1,
            layer_types=["full_attention"],
        )
        self.target = tiny.target(
            "llama", vocab_size=VOCAB, hidden_size=16, intermediate_size=24, head_dim=8, num_hidden_layers=2
        ).double()
        self.drafter = bind(tiny.drafter(raw, lent=False), self.target)
        self.sampling = sampling
        self.settings = Settings(k=K, max_new_tokens=TOKENS, sampling=sampling, draft_temperature=draft_temperature)
        self.rows: dict[tuple[int, ...], list[float]] = {}

    def p(self, ids: list[int]) -> list[float]:
        """The target's distribution after ``ids``, from transformers alone."""
        if tuple(ids) not in self.rows:
            rules = LogitsProcessorList()
            if self.sampling.repetition_penalty != 1:
                rules.append(RepetitionPenaltyLogitsProcessor(self.sampling.repetition_penalty))
            rules.append(TemperatureLogitsWarper(self.sampling.temperature))
            if self.sampling.top_k:
                rules.append(TopKLogitsWarper(self.sampling.top_k))
            inputs = torch.tensor([ids])
            with torch.no_grad():
                logits = rules(inputs, self.target(input_ids=inputs).logits[:, -1])
            self.rows[tuple(ids)] = logits.softmax(-1)[0].tolist()
        return self.rows[tuple(ids)]

    def clone(self, request: ReferenceRequest, script: Script) -> ReferenceRequest:
        shared = {id(part): part for part in (self.target, self.drafter, self.settings)}
        twin = copy.deepcopy(request, shared)
        twin.streams = script
        return twin

    def run(self) -> dict[tuple[int, ...], float]:
        """Probability of each tuple of emitted tokens. States with the same tokens are merged."""
        states: dict[tuple[int, ...], Path] = {(): (1.0, self.fresh())}
        done: dict[tuple[int, ...], float] = defaultdict(float)
        while states:
            # Shortest first, so that a longer state has collected all its paths before it goes on.
            mass, request = states.pop(min(states, key=len))
            for part, after in self.step(request):
                ids = tuple(after.ids[len(PROMPT) :])
                if after.reason is None:
                    states[ids] = (states.get(ids, (0.0, after))[0] + mass * part, after)
                else:
                    done[ids] += mass * part
        return dict(done)

    def fresh(self) -> ReferenceRequest:
        return ReferenceRequest(self.target, self.drafter, PROMPT, self.settings)

    def step(self, request: ReferenceRequest) -> Iterator[Path]:
        if len(request.ids) == len(PROMPT):
            yield from self.finals(request, 1.0, None, [], self.p(request.ids), [])
            return
        slots = request.alignment.block().proposals
        for mass, proposals in self.drafted(request, slots):
            yield from self.verified(request, mass, proposals, slots)

    def drafted(self, request: ReferenceRequest, slots: int) -> Iterator[tuple[float, Proposals | None]]:
        """Every draft with its probability: slot by slot, each q read off the draft made so far."""
        if slots == 0:
            yield 1.0, None
            return
        yield from self._slot(request, slots, [], 1.0)

    def _slot(
        self, request: ReferenceRequest, slots: int, numbers: list[float], mass: float
    ) -> Iterator[tuple[float, Proposals]]:
        twin = self.clone(request, Script(draft=[*numbers, *[0.5] * (K - len(numbers))]))
        (proposals,) = draft_together([twin], method_of(self.drafter.config))
        if len(numbers) == slots or not isinstance(proposals.q, Dense | Sparse):
            yield mass, proposals
            return
        ids, probs = q_row(proposals, len(numbers))
        low = 0.0
        for token, prob in zip(ids, probs, strict=True):
            if prob > 0:
                number = low + prob / 2
                for part, longer in self._slot(request, slots, [*numbers, number], mass * prob):
                    assert longer.ids[0, len(numbers)] == token
                    yield part, longer
            low += prob

    def verified(
        self, request: ReferenceRequest, mass: float, proposals: Proposals | None, slots: int
    ) -> Iterator[Path]:
        """Accept none, one, .. all of the proposals, each with its probability, and then the final token."""
        tokens = [] if proposals is None else proposals.ids[0, :slots].tolist()
        numbers: list[float] = []
        for slot, token in enumerate(tokens):
            p, q = self.p([*request.ids, *tokens[:slot]]), full_q(proposals, slot)
            ratio = min(1.0, p[token] / q[token])
            if ratio < 1 - EDGE:
                left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
                rejected = [*numbers, ratio * (1 + EDGE) if ratio else 0.0]
                yield from self.finals(request, mass * (1 - ratio), proposals, tokens[:slot], left, rejected)
            if ratio == 0:
                return
            numbers.append(ratio * (1 - EDGE))
            mass *= ratio
        yield from self.finals(request, mass, proposals, tokens, self.p([*request.ids, *tokens]), numbers)

    def finals(
        self,
        request: ReferenceRequest,
        mass: float,
        proposals: Proposals | None,
        accepted: list[int],
        weights: list[float],
        numbers: list[float],
    ) -> Iterator[Path]:
        """Every final token: both ends of its interval lead to it."""
        total, low = sum(weights), 0.0
        accept = [*numbers, *[0.5] * K]
        for token, weight in enumerate(weights):
            share = weight / total
            if share > 0:
                for number in (low + share * 1e-3, low + share * (1 - 1e-3)):
                    twin = self.clone(request, Script(accept=accept, final=number))
                    done = twin.prefill() if len(request.ids) == len(PROMPT) else twin.verify(proposals)
                    assert done.emitted == (*accepted, token)
                    assert done.accepted == len(accepted)
                yield mass * share, twin
            low += share


def q_row(proposals: Proposals, slot: int) -> tuple[list[int], list[float]]:
    """Ids in the order in which the slot was drawn, and q of each."""
    if isinstance(proposals.q, Sparse):
        return proposals.q.ids[0, slot].tolist(), proposals.q.probs[0, slot].tolist()
    assert isinstance(proposals.q, Dense)
    return list(range(VOCAB)), proposals.q.probs[0, slot].tolist()


def full_q(proposals: Proposals | None, slot: int) -> list[float]:
    """q over the vocabulary; one-hot for an argmax."""
    assert proposals is not None
    out = [0.0] * VOCAB
    if isinstance(proposals.q, Dense | Sparse):
        for token, prob in zip(*q_row(proposals, slot), strict=True):
            out[token] += prob
    else:
        out[int(proposals.ids[0, slot])] = 1.0
    return out


@pytest.mark.parametrize(
    ("method", "sampling", "draft_temperature"),
    [
        ("dflash", Sampling(temperature=0.8), None),
        ("dflash", Sampling(temperature=0.8), 0.0),
        ("dflash2", Sampling(temperature=1.1, top_k=2, repetition_penalty=1.4), 0.9),
        ("dloop", Sampling(temperature=1.3), 0.7),
    ],
    ids=["dflash", "argmax-drafts", "dflash2-penalty-top-k", "dloop"],
)
def test_every_text_has_the_probability_the_target_gives_it(
    method: str, sampling: Sampling, draft_temperature: float | None
) -> None:
    enumeration = Enumeration(method, sampling, draft_temperature)
    found = enumeration.run()
    for text in product(range(VOCAB), repeat=TOKENS):
        wanted, ids = 1.0, list(PROMPT)
        for token in text:
            wanted *= enumeration.p(ids)[token]
            ids.append(token)
        # q is fp32; a wrong rule is off by more than 1e-2 here.
        assert found.get(text, 0.0) == pytest.approx(wanted, abs=1e-6), text
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
