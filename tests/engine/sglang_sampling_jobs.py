"""Jobs that draw many samples of one prompt from SGLang; see sglang_jobs.py for how they are run."""

import json
import random
import sys
from pathlib import Path

from sglang_jobs import build

SIZES = {"max_running_requests": 128, "max_total_tokens": 16384, "skip_tokenizer_init": False}
GREEDY = {"temperature": 0}


def sampled(target, prompt, rules, samples, out, drafter=None, k=None, greedy=0, **options):
    """``samples`` texts by every rule, all in one batch, with ``greedy`` greedy requests among them."""
    engine = build(target, drafter, k, **(SIZES | options))
    asked = [name for name in rules for _ in range(samples)] + [None] * greedy
    random.Random(1).shuffle(asked)
    length = {"max_new_tokens": next(iter(rules.values()))["max_new_tokens"], "ignore_eos": True}
    params = [{"temperature": 1} | rules[name] if name else GREEDY | length for name in asked]
    try:
        outputs = engine.generate(input_ids=[prompt] * len(asked), sampling_params=params)
    finally:
        engine.shutdown()
    texts = {name: [] for name in rules} | {"greedy": []}
    for name, output in zip(asked, outputs, strict=True):
        texts[name or "greedy"].append(output["output_ids"])
    rounds = sum(output["meta_info"].get("spec_verify_ct") or 0 for output in outputs)
    accepted = sum(output["meta_info"].get("spec_num_correct_drafts") or 0 for output in outputs)
    Path(out).write_text(json.dumps({"texts": texts, "emitted": 1 + accepted / rounds if rounds else None}))


def greedily(target, requests, out, drafter=None, k=None, **options):
    """Ids of greedy requests [{prompt, ...}] given at once, and how often any of them was put back to the queue."""
    engine = build(target, drafter, k, **(SIZES | options))
    try:
        outputs = engine.generate(
            input_ids=[one["prompt"] for one in requests],
            sampling_params=[
                GREEDY | {name: value for name, value in one.items() if name != "prompt"} for one in requests
            ],
        )
    finally:
        engine.shutdown()
    put_back = sum(output["meta_info"]["num_retractions"] for output in outputs)
    Path(out).write_text(json.dumps({"ids": [output["output_ids"] for output in outputs], "put back": put_back}))


def filtered(file, out):
    """Weights [V] that the engine's own sampler leaves each row of ``file``: [{logits, temperature, top_k, ...}]."""
    import torch
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as sampler

    rows = json.loads(Path(file).read_text())
    logits, temperature, top_k, top_p, min_p = (torch.tensor([row[name] for row in rows]) for name in rows[0])
    probs = torch.softmax(logits / temperature[:, None], dim=-1)
    _, weights, ids, _ = sampler(probs, top_k, top_p, min_p, True, None, None, return_filtered_probs=True)
    Path(out).write_text(json.dumps({"weights": torch.zeros_like(probs).scatter_(1, ids.long(), weights).tolist()}))


if __name__ == "__main__":
    {f.__name__: f for f in (sampled, greedily, filtered)}[sys.argv[1]](**json.loads(sys.argv[2]))
