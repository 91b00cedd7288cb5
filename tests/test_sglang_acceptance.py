"""The rules by which sampled requests of SGLang are verified, in torch alone: no engine is imported."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dflash_plugins.proposals import Dense, OneHot, Proposals
from sglang_ext.acceptance import NO_ACCEPTANCE, accept, core_may_verify, ours, target_probs
from sglang_ext.features import refused_rules
from sglang_ext.penalties import Outputs, counts_tokens

ALL = 1 << 30  # what the engine makes of "no top_k"


@dataclass
class Sampling:
    """What the engine's SamplingBatchInfo says of R requests."""

    temperatures: Any = 1.0
    top_ks: Any = ALL
    top_ps: Any = 1.0
    min_ps: Any = 0.0
    penalizer_orchestrator: Any = None
    acc_additive_penalties: Any = None
    acc_scaling_penalties: Any = None

    def __post_init__(self) -> None:
        self.temperatures = torch.as_tensor(self.temperatures).view(-1, 1)
        self.top_ks = torch.as_tensor(self.top_ks, dtype=torch.int32).view(-1)
        self.top_ps, self.min_ps = (torch.as_tensor(one).view(-1) for one in (self.top_ps, self.min_ps))
        self.need_top_k_sampling = bool((self.top_ks != ALL).any())
        self.need_top_p_sampling = bool((self.top_ps != 1.0).any())
        self.need_min_p_sampling = bool((self.min_ps > 0).any())


@dataclass(eq=False)
class Request:
    """What the engine's record of a request says."""

    sampling_params: Any
    output_ids: list[int] = field(default_factory=list)
    eos_token_ids: Any = None
    tokenizer: Any = None
    custom_logit_processor: Any = None
    return_sampling_mask: bool = False


@dataclass
class Params:
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: Any = None


def logits(*weights: float) -> torch.Tensor:
    """One row whose softmax at temperature 1 is in the ratio of ``weights``."""
    return torch.tensor([[weights]]).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [1, 2, 4, 8]),
        (Sampling(temperatures=0.5), [1, 4, 16, 64]),
        (Sampling(top_ks=2), [0, 0, 4, 8]),
        (Sampling(top_ks=1), [0, 0, 0, 1]),
        (Sampling(top_ps=0.5), [0, 0, 0, 1]),  # 8/15 lies before the second
        (Sampling(top_ps=0.54), [0, 0, 4, 8]),
        (Sampling(top_ps=0.81), [0, 2, 4, 8]),
        (Sampling(min_ps=0.3), [0, 0, 4, 8]),
        (Sampling(min_ps=0.2), [0, 2, 4, 8]),
        # Before the third token lie 12/15 of all mass, though all of what top_k left.
        (Sampling(top_ks=3, top_ps=0.79), [0, 0, 4, 8]),
        (Sampling(top_ks=3, top_ps=0.81), [0, 2, 4, 8]),
        (Sampling(top_ks=3, top_ps=0.85, min_ps=0.3), [0, 0, 4, 8]),
        (Sampling(temperatures=0.5, top_ks=3, top_ps=0.9, min_ps=0.05), [0, 0, 16, 64]),
        # A greedy request says top_k 1, whatever else it says.
        (Sampling(temperatures=2.0, top_ks=1, top_ps=0.2, min_ps=0.9), [0, 0, 0, 1]),
    ],
)
def test_target_probabilities_by_hand(sampling: Any, expected: list[float]) -> None:
    total = sum(expected)
    got = target_probs(logits(1, 2, 4, 8), sampling)[0, 0].tolist()
    assert got == pytest.approx([weight / total for weight in expected], abs=1e-6)


def test_every_request_of_a_batch_has_its_own_rules() -> None:
    rows = torch.tensor([[[1.0, 2, 4, 8]] * 2]).log().expand(5, -1, -1).contiguous()
    rows[:, 1] = rows[:, 1].flip(-1)
    sampling = Sampling([1.0, 0.5, 1.0, 1.0, 1.0], [ALL, ALL, 1, 2, ALL], [1.0, 1.0, 1.0, 1.0, 0.54], [0, 0.2, 0, 0, 0])
    got = target_probs(rows, sampling)
    by_hand = [[1, 2, 4, 8], [0, 0, 16, 64], [0, 0, 0, 1], [0, 0, 4, 8], [0, 0, 4, 8]]
    for row, expected in zip(got, by_hand, strict=True):
        weights = [one / sum(expected) for one in expected]
        assert row[0].tolist() == pytest.approx(weights, abs=1e-6)
        assert row[1].tolist() == pytest.approx(weights[::-1], abs=1e-6)


def test_a_greedy_request_takes_the_best_logit_where_probabilities_tie() -> None:
    """As the engine's argmax, which sees what a softmax in fp32 rounds away."""
    assert target_probs(torch.tensor([[[1e-9, 2e-9]]]), Sampling(top_ks=1))[0, 0].tolist() == [0, 1]


def test_a_token_that_a_mask_or_a_bias_took_away_stays_away() -> None:
    row = torch.tensor([[[0.0, float("-inf"), 1.0]]])
    for sampling in (Sampling(), Sampling(top_ps=0.99), Sampling(min_ps=0.01)):
        assert target_probs(row, sampling)[0, 0, 1] == 0
    one_left = torch.tensor([[[float("-inf"), float("-inf"), 1.0]]])
    assert target_probs(one_left, Sampling(top_ks=2))[0, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("drafts", "all_greedy", "engine_can", "allowed"), list(itertools.product([True, False], repeat=4))
)
def test_whose_turn_it_is_to_verify(drafts: bool, all_greedy: bool, engine_can: bool, allowed: bool) -> None:
    """Ours are sampled batches that our worker drafted, and those that the engine would turn into greedy ones."""
    core = {(True, False, True, True), (True, False, False, True), (False, False, False, True)}
    mine = ours(drafts=drafts, all_greedy=all_greedy, engine_can=engine_can, allowed=allowed)
    assert mine is ((drafts, all_greedy, engine_can, allowed) in core)


def test_the_switch_warns_and_is_read_strictly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sglang.dflash_plugins"):
        assert core_may_verify({})
        assert core_may_verify({NO_ACCEPTANCE: "0"})
        assert not caplog.records
        assert not core_may_verify({NO_ACCEPTANCE: "1"})
    assert NO_ACCEPTANCE in caplog.text
    with pytest.raises(ValueError, match=f"{NO_ACCEPTANCE}='maybe'"):
        core_may_verify({NO_ACCEPTANCE: "maybe"})


P = [0.1, 0.2, 0.3, 0.4]
Q = [0.4, 0.3, 0.2, 0.1]


def first_tokens(drawn: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
    """Share of each token among the first emitted, for proposals ``drawn`` [R] verified with ``q`` [V], or one-hot."""
    torch.manual_seed(5)
    candidates = torch.stack([torch.zeros_like(drawn), drawn], dim=1)
    rows = torch.tensor(P).log().expand(len(drawn) * 2, -1)
    said = OneHot() if q is None else Dense(q.expand(len(drawn), 1, -1))
    verdict = accept(
        candidates,
        Proposals.of(drawn[:, None], said),
        rows,
        Sampling([1.0] * len(drawn), [ALL] * len(drawn), [1.0] * len(drawn)),
    )
    return verdict.emitted_ids[:, 0].bincount(minlength=4) / len(drawn)


def test_the_first_token_has_the_law_of_the_target_and_a_wrong_q_breaks_it() -> None:
    """40,000 draws: the standard deviation of a share is at most 0.0025; the bound allows five of them.

    By hand for the wrong q: proposals are always token 3 but said to be drawn from Q = P reversed. Accepted is it with
    min(1, 0.4 / 0.1) = 1: nothing but token 3 is ever emitted.
    """
    many = 40000
    drawn = torch.multinomial(torch.tensor(Q), many, replacement=True, generator=torch.Generator().manual_seed(1))
    assert first_tokens(drawn, torch.tensor(Q)).tolist() == pytest.approx(P, abs=0.0125)
    argmax = torch.full((many,), 3)
    assert first_tokens(argmax, None).tolist() == pytest.approx(P, abs=0.0125)
    assert first_tokens(argmax, torch.tensor(Q)).tolist() == [0, 0, 0, 1]


# Penalties


def rows_after(request: Request, tokens: list[list[int]], block: list[int], start: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] of the rows of ``block`` after rounds that emitted ``tokens``; before, every row is ``start``."""
    outputs = Outputs(len(start))
    outputs.at_prefill([request], Sampling())
    outputs.begin([request], torch.tensor([tokens[0][0]]))
    for emitted in tokens[1:]:
        padded = torch.tensor([emitted + [0] * (4 - len(emitted))])
        outputs.add([request], padded, torch.tensor([len(emitted)]))
    rows = start.repeat(len(block), 1)
    outputs.penalise([request], torch.tensor([block]), rows)
    return rows


def test_a_row_counts_what_was_emitted_and_what_its_block_proposes_before_it() -> None:
    """Emitted: 1; 1, 2. The anchor is 2, the proposals are 3 and 1. All logits are 4 but for token 4's, which is -4."""
    start = torch.tensor([4.0, 4.0, 4.0, 4.0, -4.0])
    request = Request(Params(frequency_penalty=0.5))
    got = rows_after(request, [[1], [1, 2]], [2, 3, 1], start)
    assert got.tolist() == [[4, 3, 3.5, 4, -4], [4, 3, 3.5, 3.5, -4], [4, 2.5, 3.5, 3.5, -4]]
    request = Request(Params(presence_penalty=1.0))
    assert rows_after(request, [[1], [1, 2]], [2, 3, 1], start).tolist() == [
        [4, 3, 3, 4, -4], [4, 3, 3, 3, -4], [4, 3, 3, 3, -4],
    ]  # fmt: skip
    request = Request(Params(repetition_penalty=2.0))
    assert rows_after(request, [[1], [4, 2]], [2, 3, 1], start).tolist() == [
        [4, 2, 2, 4, -8], [4, 2, 2, 2, -8], [4, 2, 2, 2, -8],
    ]  # fmt: skip


def test_additive_penalties_come_before_the_repetition_penalty() -> None:
    """1 - 2 = -1, which is then multiplied; the other way around it would be 1 / 2 - 2."""
    request = Request(Params(presence_penalty=2.0, repetition_penalty=2.0))
    assert rows_after(request, [[1]], [1], torch.tensor([1.0, 1.0])).tolist() == [[1, -2]]


def test_no_text_ends_before_min_new_tokens_in_any_row() -> None:
    """Two tokens are there, so row 0 decides the third, row 1 the fourth, row 2 the fifth."""
    request = Request(Params(min_new_tokens=4, stop_token_ids={1}), eos_token_ids={0})
    got = rows_after(request, [[2], [3]], [3, 2, 2], torch.zeros(4))
    low = float("-inf")
    assert got.tolist() == [[low, low, 0, 0], [low, low, 0, 0], [0, 0, 0, 0]]


def test_only_requests_that_ask_for_it_are_changed() -> None:
    outputs, asked, other = Outputs(3), Request(Params(presence_penalty=1.0)), Request(Params())
    assert counts_tokens(asked)
    assert not counts_tokens(other)
    outputs.at_prefill([other, asked], Sampling([1.0, 1.0]))
    outputs.begin([other, asked], torch.tensor([1, 2]))
    rows = torch.zeros(4, 3)
    outputs.penalise([other, asked], torch.tensor([[1, 0], [2, 0]]), rows)
    assert rows.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, -1], [-1, 0, -1]]


def test_a_request_that_was_put_back_keeps_its_counts() -> None:
    """The engine's own penalties begin anew there. Tokens 1, 1, 2 are there; the prefill draws the fourth."""
    params = Params(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0, min_new_tokens=4)
    request, outputs = Request(params, output_ids=[1, 1, 2], eos_token_ids={0}), Outputs(4)
    given = outputs.at_prefill([Request(Params()), request], Sampling([1.0, 1.0]))
    assert given.acc_additive_penalties.tolist() == [[0, 0, 0, 0], [float("-inf"), -1.25, -0.75, 0]]
    assert given.acc_scaling_penalties.tolist() == [[1, 1, 1, 1], [1, 2, 2, 1]]
    outputs.begin([Request(Params()), request], torch.tensor([0, 3]))
    rows = torch.zeros(2, 4)
    outputs.penalise([request], torch.tensor([[3, 3]]), rows)
    assert rows.tolist() == [[0, -2.5, -1.5, -1.5], [0, -2.5, -1.5, -2.5]]


def test_counts_go_with_the_engines_record() -> None:
    outputs, request = Outputs(3), Request(Params(presence_penalty=1.0))
    outputs.at_prefill([request], Sampling())
    assert len(outputs._counts) == 1
    del request
    assert not outputs._counts


def test_what_cannot_be_verified_is_refused_with_all_reasons_and_taken_away() -> None:
    assert refused_rules(Request(Params(presence_penalty=1.0))) is None
    request = Request(Params(), custom_logit_processor="{}", return_sampling_mask=True)
    sentence = refused_rules(request)
    assert sentence is not None
    assert "custom_logit_processor: " in sentence
    assert "return_sampling_mask: " in sentence
    assert request.custom_logit_processor is None
    assert request.return_sampling_mask is False
