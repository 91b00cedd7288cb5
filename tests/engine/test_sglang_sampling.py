"""A real SGLang on a CPU: sampled texts follow the target's own law, whatever method drafts.

The law is computed exactly, token by token, so there is one sample and no second one to compare it with. The tests,
their number, the bins and alpha are fixed before a sample is drawn. ``DFLASH_PLUGINS_TEST_SAMPLES`` draws more.
"""

import json
import math
import os
import random
from types import SimpleNamespace

import exact_law
import pytest
import torch
import trained
from prompted import PromptedTarget, smallest_effect

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.heavy]

SAMPLES = int(os.environ.get("DFLASH_PLUGINS_TEST_SAMPLES", "2000"))
LENGTH = 6
LEAST = 0.01
K = 3
GREEDY = 40  # greedy requests among the sampled ones
RULES = {
    "temperature": {},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.15},
    "top_k, top_p and min_p": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "logit_bias": {},  # its ids are chosen with the prompt
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.8},
    "all penalties and logit_bias": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 3, "ignore_eos": False},
}
# Bonferroni: one chance in a thousand that any of them calls a lossless engine lossy.
ALPHA = 1e-3 / (len(RULES) * len(trained.METHODS))


def next_token(logits, prompt, output, rule):
    """Probabilities [V] of the next token under sampling parameters as SGLang names and orders them, by loops.

    Only the output counts for penalties. top_p is of all mass, also of what top_k takes away.
    """
    scores = [float(x) for x in logits]
    for token in set(output):
        count = output.count(token)
        scores[token] -= rule.get("frequency_penalty", 0) * count + rule.get("presence_penalty", 0)
        repetition = rule.get("repetition_penalty", 1)
        scores[token] = scores[token] * repetition if scores[token] < 0 else scores[token] / repetition
    if len(output) < rule.get("min_new_tokens", 0):
        for token in {trained.EOS, *rule.get("stop_token_ids", ())}:
            scores[token] = -math.inf
    for token, bias in rule.get("logit_bias", {}).items():
        scores[int(token)] += bias
    probs = exact_law.softmax([x / rule.get("temperature", 1.0) for x in scores])
    kept, before = [], 0.0
    for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
        enough = len(kept) >= rule.get("top_k", len(probs)) or before > rule.get("top_p", 1.0)
        if not enough and probs[token] >= rule.get("min_p", 0.0) * max(probs):
            kept.append(token)
        before += probs[token]
    out = torch.zeros(len(probs), dtype=torch.float64)
    for token in kept:
        out[token] = probs[token] / sum(probs[t] for t in kept)
    return out


class Law(PromptedTarget):
    """The target in transformers, its prompt, and the exact law of every rule."""

    def __init__(self):
        super().__init__(LENGTH)
        best, second = self.logits([self.prompt])[0].topk(2).indices.tolist()
        biased = {"logit_bias": {str(best): -1.5, str(second): 1.0, str(self.greedy[2]): -2.0}}
        stops = {"stop_token_ids": [trained.EOS, self.greedy[1], self.greedy[3]]}
        more = {"logit_bias": biased, "all penalties and logit_bias": biased, "min_new_tokens": stops}
        base = {"max_new_tokens": LENGTH, "ignore_eos": True}
        self.rules = {name: base | rule | more.get(name, {}) for name, rule in RULES.items()}
        self.bins = {
            name: exact_law.bins(self.logits, self.prompt, rule, LENGTH, LEAST, next_token)
            for name, rule in self.rules.items()
        }


@pytest.fixture(scope="module")
def law():
    return Law()


def draw(run_sglang, law, method, rules, **options):
    target, drafter = trained.pair(method)
    return run_sglang(
        "sampled", script="sglang_sampling_jobs.py", target=target, drafter=drafter, k=K, prompt=law.prompt,
        samples=SAMPLES, greedy=GREEDY, rules={name: law.rules[name] for name in rules}, **options,
    )  # fmt: skip


@pytest.fixture(scope="module", params=trained.METHODS)
def drawn(request, run_sglang, law):
    return draw(run_sglang, law, request.param, RULES) | {"method": request.param}


@pytest.mark.parametrize("rule", RULES)
def test_sampled_texts_follow_the_target(drawn, law, rule):
    texts = drawn["texts"][rule]
    assert len(texts) == SAMPLES
    p, freedom = exact_law.fit(texts, *law.bins[rule])
    print(f"{drawn['method']}, {rule}: p = {p:.3g}, {freedom} degrees, TV {smallest_effect(freedom, ALPHA):.3f}")
    assert p > ALPHA
    assert smallest_effect(freedom, ALPHA) < 0.15


def test_greedy_requests_among_them_get_the_argmax(drawn, law):
    assert drawn["texts"]["greedy"] == [law.greedy] * GREEDY


def test_proposals_are_accepted_and_rejected(drawn):
    """Where nearly all or none are, a fault of acceptance or of the residual would not show."""
    assert 1.2 < drawn["emitted"] < 3.7


@pytest.mark.parametrize("method", trained.METHODS)
def test_a_wrong_q_is_found(run_sglang, law, method):
    """An argmax proposal handed over with the softmax of its scores; otherwise the tests above prove nothing."""
    got = draw(run_sglang, law, method, ["temperature"], environment={"SGLANG_FAULT": "q_of_an_argmax"})
    p, _ = exact_law.fit(got["texts"]["temperature"], *law.bins["temperature"])
    print(f"{method}, planted: p = {p:.3g}")
    assert p < ALPHA


@pytest.mark.parametrize("method", ["dflash", "dloop-selector"])
def test_without_our_acceptance_sglang_falls_back_to_greedy(run_sglang, law, method):
    """What stock SGLang does on a CPU: after the first token, which prefill draws, only the most probable ones."""
    got = draw(run_sglang, law, method, ["temperature"], environment={"DFLASH_PLUGINS_NO_ACCEPTANCE": "1"})
    assert got["log"].count("DFLASH_PLUGINS_NO_ACCEPTANCE is set") == 1
    texts = {tuple(text) for text in got["texts"]["temperature"]}
    firsts = {text[0] for text in texts}
    assert len(firsts) > 3
    assert len(texts) == len(firsts)
    assert exact_law.fit(got["texts"]["temperature"], *law.bins["temperature"])[0] < ALPHA


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_where_sglang_drafts_by_itself_the_core_verifies_what_it_has_no_kernel_for(run_sglang, law, method):
    rules = ["temperature", "top_k, top_p and min_p", "all penalties and logit_bias", "min_new_tokens"]
    got = draw(run_sglang, law, method, rules, environment={"SGLANG_FAULT": "engine_drafts"})
    for rule in rules:
        p, _ = exact_law.fit(got["texts"][rule], *law.bins[rule])
        print(f"{method}, drafted by SGLang, {rule}: p = {p:.3g}")
        assert p > ALPHA
    assert got["texts"]["greedy"] == [law.greedy] * GREEDY
    assert got["emitted"] > 1.2


@pytest.mark.parametrize("options", [{"disable_overlap_schedule": True}], ids=["without overlap"])
def test_the_schedule_does_not_matter(run_sglang, law, options):
    rules = ["temperature", "all penalties and logit_bias", "min_new_tokens"]
    got = draw(run_sglang, law, "dloop-selector", rules, **options)
    for rule in rules:
        p, _ = exact_law.fit(got["texts"][rule], *law.bins[rule])
        print(f"{rule}, {options}: p = {p:.3g}")
        assert p > ALPHA


# Without overlap SGLang applies the repetition penalty before or after the others as a set of classes happens to be
# ordered, so here it stands alone; with overlap it comes last, which is the order that the exact law above follows.
PENALTIES = [
    {"frequency_penalty": 1.0},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.8},
    {"min_new_tokens": 20},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "min_new_tokens": 10},
    {},
]


def penalised(run_sglang, method, rules, **options):
    target, drafter = trained.pair(method or "dflash")
    prompts = trained.prompts(24, seed=5)
    asked = [{"prompt": prompt, "max_new_tokens": 40} | rules[i % len(rules)] for i, prompt in enumerate(prompts)]
    return run_sglang(
        "greedily", script="sglang_sampling_jobs.py", target=target, requests=asked, drafter=method and drafter,
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain_penalised(run_sglang):
    """Plain SGLang without overlap: with it, its penalties lack the newest token, and count the prompt's last one."""
    plain = penalised(run_sglang, None, PENALTIES, disable_overlap_schedule=True)["ids"]
    without = penalised(run_sglang, None, [{}])["ids"]
    assert sum(a != b for a, b in zip(plain, without, strict=True)) > 5
    return plain


@pytest.mark.parametrize("method", trained.METHODS)
def test_penalised_texts_are_the_plain_ones(run_sglang, plain_penalised, method):
    assert penalised(run_sglang, method, PENALTIES)["ids"] == plain_penalised


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_penalised_texts_are_the_plain_ones_where_sglang_drafts_by_itself(run_sglang, plain_penalised, method):
    got = penalised(run_sglang, method, PENALTIES, environment={"SGLANG_FAULT": "engine_drafts"})
    assert got["ids"] == plain_penalised


def test_requests_that_are_put_back_half_way_keep_their_penalties(run_sglang, plain_penalised):
    often = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
    got = penalised(run_sglang, "dloop", PENALTIES, environment=often)
    assert got["put back"] > 5
    assert got["ids"] == plain_penalised


def test_rules_are_those_of_the_engines_own_sampler(run_sglang, tmp_path):
    """Random rows, the same support and the same weights; with and without each rule."""
    from sglang_ext.acceptance import target_probs

    source, generator = random.Random(3), torch.Generator().manual_seed(3)
    rows = []
    for _ in range(300):
        rules = {"temperature": (0.3, 1.0, 2.0), "top_k": (1 << 30, 1, 5, 40), "top_p": (1.0, 0.5, 0.95)}
        rules |= {"min_p": (0.0, 0.02, 0.3)}
        logits = (3 * torch.randn(trained.VOCAB, generator=generator)).tolist()
        rows.append({"logits": logits} | {name: source.choice(values) for name, values in rules.items()})
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    theirs = torch.tensor(run_sglang("filtered", script="sglang_sampling_jobs.py", file=file)["weights"])
    theirs /= theirs.sum(dim=1, keepdim=True)
    names = {"top_ks": "top_k", "top_ps": "top_p", "min_ps": "min_p", "temperatures": "temperature"}
    sampling = SimpleNamespace(
        need_top_k_sampling=True, need_top_p_sampling=True, need_min_p_sampling=True,
        **{name: torch.tensor([row[key] for row in rows]) for name, key in names.items()},
    )  # fmt: skip
    mine = target_probs(torch.tensor([row["logits"] for row in rows])[:, None], sampling)[:, 0]
    assert torch.equal(mine > 0, theirs > 0)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert len({int(size) for size in (mine > 0).sum(dim=1)}) > 20
