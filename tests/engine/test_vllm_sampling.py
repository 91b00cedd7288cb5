"""A real vLLM on a CPU: sampled texts follow the target's own law, whatever method drafts and however it draws.

The law is computed exactly, token by token, so there is one sample and no second one to compare it with. The tests,
their number, the bins and alpha are fixed before a sample is drawn. ``DFLASH_PLUGINS_TEST_SAMPLES`` draws more.
"""

import math
import os

import exact_law
import pytest
import torch
import trained
from prompted import PromptedTarget, smallest_effect

SAMPLES = int(os.environ.get("DFLASH_PLUGINS_TEST_SAMPLES", "2000"))
LENGTH = 6
LEAST = 0.01
RULES = {
    "temperature": {},
    "seeded": {"seed": 1000},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "top_k and top_p": {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.8},
    "min_tokens": {"min_tokens": 3},
}
DRAFTING = ("drawn", "argmax")
# Bonferroni: one chance in a thousand that any of them calls a lossless engine lossy.
ALPHA = 1e-3 / (len(RULES) * len(DRAFTING) * len(trained.METHODS))


class Law(PromptedTarget):
    """The target in transformers, its prompt, and the exact law of every rule."""

    def __init__(self):
        super().__init__(LENGTH)
        # The engine keeps EOS back, too, until min_tokens are there.
        stops = {"stop_token_ids": [trained.EOS, self.greedy[1], self.greedy[3]]}
        base = {"max_tokens": LENGTH, "ignore_eos": True}
        self.rules = {name: base | rule | (stops if "min_tokens" in rule else {}) for name, rule in RULES.items()}
        self.bins = {n: exact_law.bins(self.logits, self.prompt, r, LENGTH, LEAST) for n, r in self.rules.items()}


@pytest.fixture(scope="module")
def law():
    return Law()


@pytest.fixture(scope="module", params=trained.METHODS)
def drawn(request, run_job, law):
    target, drafter = trained.pair(request.param)
    got = run_job(
        "sampled", script="sampling_jobs.py", target=target, drafter=drafter, prompt=law.prompt, rules=law.rules,
        samples=SAMPLES,
    )  # fmt: skip
    return got | {"method": request.param}


@pytest.mark.engine
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("rule", RULES)
def test_sampled_texts_follow_the_target(drawn, law, rule, drafting):
    texts = drawn[drafting]["texts"][rule]
    assert len(texts) == SAMPLES
    p, freedom = exact_law.fit(texts, *law.bins[rule])
    effect = smallest_effect(freedom, ALPHA)
    print(f"{drawn['method']}, {rule}, {drafting}: p = {p:.3g}, {freedom} degrees, TV {effect:.3f}")
    assert p > ALPHA
    assert effect < 0.15


@pytest.mark.engine
@pytest.mark.heavy
@pytest.mark.slow
def test_a_wrong_q_is_found(drawn, law):
    """F56: an argmax proposal handed over with the softmax of its scores; otherwise the tests above prove nothing."""
    p, _ = exact_law.fit(drawn["planted"]["texts"]["temperature"], *law.bins["temperature"])
    print(f"{drawn['method']}, planted: p = {p:.3g}")
    assert p < ALPHA


@pytest.mark.engine
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("drafting", DRAFTING)
def test_proposals_are_accepted_and_rejected(drawn, drafting):
    """Where nearly all or none are, a fault of acceptance or of the residual would not show."""
    assert 1.3 < drawn[drafting]["emitted"] < 3.7


@pytest.mark.engine
@pytest.mark.heavy
@pytest.mark.slow
def test_every_seed_gives_another_text(drawn, law):
    texts = {tuple(text) for text in drawn["drawn"]["texts"]["seeded"]}
    assert len(texts) > len(law.bins["seeded"][0]) / 2


def test_next_token_by_hand():
    """Logits ln 1, ln 2, ln 4, ln 8; token 3 stands in the prompt, token 2 once in the output."""
    logits = [0.0, math.log(2), math.log(4), math.log(8)]

    def law(**rule):
        return exact_law.next_token(logits, [3], [2], rule).tolist()

    assert law() == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15])
    assert law(top_k=2) == pytest.approx([0, 0, 1 / 3, 2 / 3])
    assert law(top_p=0.6) == pytest.approx([0, 0, 1 / 3, 2 / 3])
    assert law(top_p=0.5) == pytest.approx([0, 0, 0, 1])
    assert law(top_k=3, top_p=0.7) == pytest.approx([0, 0, 1 / 3, 2 / 3])
    assert law(temperature=0.5) == pytest.approx([1 / 85, 4 / 85, 16 / 85, 64 / 85])
    assert law(presence_penalty=math.log(2)) == pytest.approx([1 / 13, 2 / 13, 2 / 13, 8 / 13])
    assert law(repetition_penalty=2) == pytest.approx([w / (1 + 2 + 2 + 8**0.5) for w in (1, 2, 2, 8**0.5)])
    assert law(min_tokens=2, stop_token_ids=[3]) == pytest.approx([1 / 7, 2 / 7, 4 / 7, 0])
    assert law(min_tokens=1, stop_token_ids=[3]) == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15])


def test_bins_by_hand():
    """Tokens 0, 1, 2 with 0.7, 0.2, 0.1 every time; 1 ends the text. Two tokens, bins of at least 0.1."""
    row = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    found, inner = exact_law.bins(lambda texts: row.expand(len(texts), -1), [9], {"stop_token_ids": [1]}, 2, 0.099)
    assert inner == {(), (0,), (2,)}
    expected = {(None,): 0, (1,): 0.2, (0, None): 0.07, (0, 0): 0.49, (0, 1): 0.14, (2, None): 0.1}
    assert found == pytest.approx(expected)
    texts = [(1,), (0, 2), (0, 0), (0, 1), (2, 0), (2, 1)]
    bins = [exact_law.bin_of(text, found, inner) for text in texts]
    assert bins == [(1,), (0, None), (0, 0), (0, 1), (2, None), (2, None)]
    with pytest.raises(KeyError, match="ended early"):
        exact_law.bin_of((0,), found, inner)


def test_pearson_by_hand():
    """(60, 40) against (50, 50): 4 on one degree of freedom leaves 0.0455; what cannot be has no chance."""

    def p(counts, expected):
        return exact_law.pearson(torch.tensor(counts).double(), torch.tensor(expected).double())

    assert p([60, 40], [50, 50]) == (pytest.approx(0.0455, abs=1e-4), 1)
    assert p([60, 38, 2, 0], [50, 46, 3, 1]) == (pytest.approx(0.1113, abs=1e-4), 2)
    assert p([60, 39, 1], [50, 50, 0])[0] == 0
    assert p([60, 40, 0], [50, 50, 0])[0] == pytest.approx(0.0455, abs=1e-4)
