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


if __name__ == "__main__":
    {f.__name__: f for f in (sampled,)}[sys.argv[1]](**json.loads(sys.argv[2]))
