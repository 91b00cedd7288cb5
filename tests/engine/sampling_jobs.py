"""Jobs that draw many samples of one prompt; see engine_jobs.py for how they are run."""

import json
import random
import sys
from pathlib import Path

import torch
from engine_jobs import build, metric, runner_of
from vllm import SamplingParams

from dflash_plugins.selector import Choice

K, TOGETHER = 3, 20
SIZES = {"max_num_seqs": 128, "max_model_len": 64, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}


def sampled(target, drafter, prompt, rules, samples, out):
    """``samples`` texts by every rule, all in one batch: proposals drawn, proposals by argmax, and a planted wrong q.

    The last draws nothing either, but tells the engine that its proposals came from the softmax of their scores.
    """
    llm = build(target, drafter, k=K, draft_sample_method="probabilistic", **SIZES)
    proposer = runner_of(llm).drafter
    result = {"drawn": draw(llm, prompt, rules, samples)}
    plant(proposer)
    result["planted"] = draw(llm, prompt, {"temperature": rules["temperature"]}, samples)
    unplant(proposer)
    proposer._enable_probabilistic_draft_probs = False
    result["argmax"] = draw(llm, prompt, rules, samples)
    Path(out).write_text(json.dumps(result))


def draw(llm, prompt, rules, samples):
    """Texts by rule, and how many tokens a round emitted. Rules stand mixed in a batch, every sample has its seed."""
    asked = [(name, first) for name in rules for first in range(0, samples, TOGETHER)]
    random.Random(1).shuffle(asked)
    before, texts = counts(llm), {name: [] for name in rules}
    params = [SamplingParams(**one(rules[name], first, samples)) for name, first in asked]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * len(asked), params, use_tqdm=False)
    for (name, _), output in zip(asked, outputs, strict=True):
        texts[name] += [list(sample.token_ids) for sample in output.outputs]
    drafts, accepted = (now - then for now, then in zip(counts(llm), before, strict=True))
    return {"texts": texts, "emitted": 1 + accepted / drafts}


def one(rule, first, samples):
    """A request for the next ``TOGETHER`` samples; the engine adds each one's number to the seed."""
    seed = {"seed": rule["seed"] + first} if "seed" in rule else {}
    return {"temperature": 1, "detokenize": False, "n": min(TOGETHER, samples - first)} | rule | seed


def counts(llm):
    return [metric(llm, f"vllm:spec_decode_num_{name}") for name in ("drafts", "accepted_tokens")]


def plant(proposer):
    """Proposals by argmax, with the softmax of their scores as their q."""
    if hasattr(proposer, "block_k"):
        proposer._choose = lambda rows, metadata: lambda scores, first: Choice(scores.argmax(-1), softmax(scores))
    else:
        proposer._sample_draft_tokens = lambda hidden, metadata: argmax_and_softmax(
            proposer.model.compute_logits(hidden)
        )


def softmax(scores):
    return torch.softmax(scores.float(), dim=-1)


def argmax_and_softmax(logits):
    return logits.argmax(-1), softmax(logits)


def unplant(proposer):
    for name in ("_choose", "_sample_draft_tokens"):
        vars(proposer).pop(name, None)


if __name__ == "__main__":
    {f.__name__: f for f in (sampled,)}[sys.argv[1]](**json.loads(sys.argv[2]))
