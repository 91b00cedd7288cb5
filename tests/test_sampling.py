"""The target distribution of a row: hand-made rows, and plain loops for penalties inside a block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_sampling import penalised

from dflash_plugins.errors import BadInput
from dflash_plugins.proposals import Proposals
from dflash_plugins.sampling import Sampling, SamplingRule, draw, target_choices, target_probs


def logits_of(*probs: float) -> torch.Tensor:
    """One request, one row (no proposal), whose softmax at temperature 1 is `probs`."""
    return torch.tensor(probs).log().view(1, 1, -1)


def probs(logits: torch.Tensor, sampling: Sampling, **context: object) -> list[float]:
    rule = SamplingRule.of([sampling], vocab_size=logits.shape[-1], **context)
    return target_probs(logits, rule)[0, 0].tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.3, 0.2]),
        (Sampling(temperature=0.5), [25 / 38, 9 / 38, 4 / 38]),
        (Sampling(top_k=2), [0.625, 0.375, 0]),
        (Sampling(top_k=9), [0.5, 0.3, 0.2]),
        (Sampling(top_p=0.6), [0.625, 0.375, 0]),
        (Sampling(top_p=0.45), [1, 0, 0]),
        (Sampling(top_p=0.0), [1, 0, 0]),  # F62
        (Sampling(top_p=0.0, top_k=2, temperature=3), [1, 0, 0]),
        # Jointly: after top-k the best token alone has 0.625 >= 0.55. On the unrestricted row 0.55 keeps two.
        (Sampling(top_k=2, top_p=0.55), [1, 0, 0]),
        (Sampling(top_p=0.55), [0.625, 0.375, 0]),
        (Sampling(min_p=0.5), [0.625, 0.375, 0]),
        (Sampling(min_p=0.7), [1, 0, 0]),
        # min-p looks at the row after temperature: 9/25 < 0.5.
        (Sampling(min_p=0.5, temperature=0.5), [1, 0, 0]),
        # and top-p at the row after min-p: 0.625 >= 0.6.
        (Sampling(min_p=0.5, top_p=0.6), [1, 0, 0]),
        (Sampling(temperature=0), [1, 0, 0]),
        (Sampling(temperature=1e-6), [1, 0, 0]),
        (Sampling(logit_bias={2: math.log(5)}), [0.5 / 1.8, 0.3 / 1.8, 1 / 1.8]),
        (Sampling(logit_bias={2: 5.0}, temperature=0), [0, 0, 1]),
    ],
)
def test_rules_by_hand(sampling, expected):
    assert probs(logits_of(0.5, 0.3, 0.2), sampling) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.55)])
def test_ties_keep_the_lowest_ids(sampling):
    assert probs(logits_of(0.1, 0.3, 0.3, 0.3), sampling) == pytest.approx([0, 0.5, 0.5, 0], abs=1e-6)


def test_ties_of_a_large_vocabulary_keep_the_lowest_ids():
    kept = torch.tensor(probs(torch.zeros(1, 1, 5000), Sampling(top_k=7))) > 0
    assert kept.nonzero().flatten().tolist() == [*range(7)]


def test_greedy_tie_is_the_lowest_id():
    assert probs(logits_of(0.1, 0.3, 0.3, 0.3), Sampling(temperature=0)) == [0, 1, 0, 0]


def test_top_p_one_keeps_a_tail_that_rounding_hides():
    """The first token alone has 1.0 in fp32, so all others lie beyond a mass of 1: still possible at top_p 1."""
    rule = SamplingRule(None, False, False, top_p=torch.tensor([1.0, 0.5]))
    kept = target_probs(torch.tensor([0.0, -20.0, -21.0]).expand(2, 1, 3), rule)[:, 0] > 0
    assert kept.tolist() == [[True, True, True], [True, False, False]]


def test_f62_top_p_zero_row_is_never_all_zero_beside_other_rows():
    rule = SamplingRule.of([Sampling(top_p=0.0), Sampling()], vocab_size=3)
    both = target_probs(logits_of(0.2, 0.5, 0.3).expand(2, 1, 3), rule)
    assert both[0, 0].tolist() == [0, 1, 0]
    assert both[1, 0].tolist() == pytest.approx([0.2, 0.5, 0.3])


def test_every_request_has_its_own_rules():
    samplings = [Sampling(temperature=0, top_p=0.9), Sampling(top_k=1), Sampling(min_p=0.5), Sampling()]
    rule = SamplingRule.of(samplings, vocab_size=3)
    assert (rule.all_greedy, rule.any_greedy) == (False, True)
    rows = target_probs(logits_of(0.5, 0.3, 0.2).expand(4, 2, 3), rule)
    expected = [[1, 0, 0], [1, 0, 0], [0.625, 0.375, 0], [0.5, 0.3, 0.2]]
    for row in range(2):
        assert rows[:, row].tolist() == [pytest.approx(values, abs=1e-6) for values in expected]


def test_grammar_mask_decides_each_row_also_the_greedy_one():
    allowed = torch.tensor([[[True, True, True], [False, True, True], [False, False, True]]])
    for temperature, expected in (
        (0, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (1, [[0.5, 0.3, 0.2], [0, 0.6, 0.4], [0, 0, 1]]),
    ):
        rule = SamplingRule.of([Sampling(temperature=temperature)], vocab_size=3, allowed=allowed)
        rows = target_probs(logits_of(0.5, 0.3, 0.2).expand(1, 3, 3), rule)[0].tolist()
        assert rows == [pytest.approx(values, abs=1e-6) for values in expected]


def test_penalties_count_the_block():
    """A greedy target that prefers 0, then 1: a proposal of 0 must push row 1 to token 1."""
    logits = torch.tensor([[[3.0, 2.5, 0.0]] * 3])
    rule = SamplingRule.of([Sampling(temperature=0, presence_penalty=1.0)], vocab_size=3, prompts=[[0]], outputs=[[]])
    proposals = Proposals.of(torch.tensor([[0, 1]]))
    assert target_choices(logits, rule, proposals).tolist() == [[0, 1, 0]]
    assert target_choices(logits, rule).tolist() == [[0, 0, 0]]  # without the block's own tokens: wrong


def test_padding_does_not_count_as_token_zero():
    logits = torch.tensor([[[3.0, 2.5, 0.0]] * 3])
    rule = SamplingRule.of([Sampling(temperature=0, presence_penalty=1.0)], vocab_size=3, prompts=[[]], outputs=[[]])
    proposals = Proposals.of(torch.tensor([[2, 0]]), lengths=torch.tensor([1]))
    assert target_choices(logits, rule, proposals).tolist() == [[0, 0, 0]]


tokens = st.integers(0, 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_penalties_equal_a_plain_loop(data):
    """Catches a lost, double or misplaced count: a wrong count moves a logit by at least 0.2, the bound is 1e-4."""
    vocab, rows = 5, data.draw(st.integers(1, 3))
    slots = data.draw(st.integers(0, 3))
    texts = [[data.draw(st.lists(tokens, max_size=4)) for _ in range(rows)] for _ in range(2)]
    ids = data.draw(st.lists(st.lists(tokens, min_size=slots, max_size=slots), min_size=rows, max_size=rows))
    lengths = data.draw(st.lists(st.integers(0, slots), min_size=rows, max_size=rows))
    penalties = [
        data.draw(st.tuples(*[st.sampled_from(v) for v in ([1, 1.5, 0.5], [0, 0.7], [0, 0.2])])) for _ in range(rows)
    ]
    samplings = [
        Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
        for repetition, presence, frequency in penalties
    ]
    logits = torch.linspace(-2, 2, rows * (slots + 1) * vocab).view(rows, slots + 1, vocab)
    proposals = Proposals.of(torch.tensor(ids, dtype=torch.int64).view(rows, slots), lengths=torch.tensor(lengths))
    rule = SamplingRule.of(samplings, vocab_size=vocab, prompts=texts[0], outputs=texts[1])
    got = target_probs(logits, rule, proposals).log()
    for r in range(rows):
        for i in range(lengths[r] + 1):
            output = texts[1][r] + ids[r][:i]
            expected = [
                penalised(float(logits[r, i, v]), v in texts[0][r] + output, output.count(v), *penalties[r])
                for v in range(vocab)
            ]
            norm = math.log(sum(map(math.exp, expected)))
            assert got[r, i].tolist() == pytest.approx([value - norm for value in expected], abs=1e-4)


def test_penalties_need_the_texts():
    with pytest.raises(BadInput, match="prompt and the output"):
        SamplingRule.of([Sampling(presence_penalty=1)], vocab_size=3)


def test_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(BadInput, match="7"):
        SamplingRule.of([Sampling(logit_bias={7: 1.0})], vocab_size=3)


def test_all_bad_values_are_named_at_once():
    with pytest.raises(BadInput) as caught:
        Sampling(temperature=-1, top_k=-1, top_p=1.5, min_p=2, repetition_penalty=0, presence_penalty=math.nan)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        assert name in str(caught.value)


def test_rule_at_one_temperature():
    assert SamplingRule.at(0, 3).all_greedy
    assert not SamplingRule.at(0.7, 3).any_greedy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probabilities_are_fp32(dtype):
    rows = target_probs(torch.zeros(1, 1, 3, dtype=dtype), SamplingRule.at(1.0, 1))
    assert rows.dtype == torch.float32
    assert rows[0, 0].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.5), Sampling(temperature=0.5, logit_bias={0: 1.0})])
def test_the_callers_logits_stay(sampling):
    logits = logits_of(0.5, 0.3, 0.2)
    before = logits.clone()
    probs(logits, sampling)
    assert torch.equal(logits, before)


def test_draw_is_the_inverse_cdf():
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]])  # of any sum
    marks = [0.0, 0.2499, 0.25, 0.9, 1 - 2**-53, 1.0]
    got = draw(weights.expand(len(marks), -1), torch.tensor(marks, dtype=torch.float64))
    assert got.tolist() == [1, 1, 3, 3, 3, 3]


def test_draw_from_nothing_stays_in_range():
    assert draw(torch.zeros(1, 3), torch.tensor([0.5], dtype=torch.float64)).item() in range(3)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 10_000])
def test_draw_over_several_stretches_equals_a_whole_running_sum(size):
    """Weights are small whole numbers with gaps, so sums are exact; marks fall inside every token's share."""
    whole = [(7 * index) % 5 if index % 3 else 0 for index in range(size)] if size > 1 else [2]
    owners = [index for index, weight in enumerate(whole) for _ in range(weight)]
    shares = range(0, len(owners), max(1, len(owners) // 50))
    marks = torch.tensor([(share + 0.5) / len(owners) for share in shares], dtype=torch.float64)
    got = draw(torch.tensor(whole, dtype=torch.float32).expand(len(marks), size), marks)
    assert got.tolist() == [owners[share] for share in shares]


def test_draw_reaches_the_tail_of_a_large_vocabulary():
    """An fp32 running sum stands still for 119 tokens at a time here; 1,000.2 tokens lie beyond the mark."""
    weights = torch.full((1, 200_001), 1e-9)
    weights[0, 0] = 1.0
    assert draw(weights, torch.tensor([1 - 1e-6], dtype=torch.float64)).item() == pytest.approx(199_000, abs=2)
