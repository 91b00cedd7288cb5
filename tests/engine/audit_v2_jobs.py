"""Jobs with an audited engine on vLLM's V2 runner; see audit_jobs.py."""

import json
import sys
from pathlib import Path

from v2_jobs import (
    OPTIONS,
    Watched,
    build,
    generate,
    generate_aborting,
    metric,
)  # first: it prepares for importing vllm

from audit_jobs import allow_async_scheduling, mixed, requests_of  # isort: skip

SIZES = OPTIONS | {"max_num_seqs": 8, "max_model_len": 160, "max_num_batched_tokens": 44, "num_gpu_blocks_override": 9}


def every(target, drafter, prompts, vocab, out, draft_sample_method=None, async_scheduling=False):
    """All that a run meets: chunks, prefix hits, preemption, cut drafts, aborts, greedy and sampled together."""
    options = {"draft_sample_method": draft_sample_method} if draft_sample_method else {}
    if async_scheduling:
        allow_async_scheduling()
    requests = [request | {"max_tokens": 30} for request in requests_of(prompts)]
    plain = build(target, **SIZES)
    truth = [r | o for r, o in zip(requests, generate(plain, requests), strict=True)]
    del plain
    llm = build(target, drafter, async_scheduling=async_scheduling, **SIZES, **options)
    watched = Watched(llm, truth)
    watched.mode = "own" if draft_sample_method else "half"
    texts = [o["ids"] for o in generate(llm, requests)]
    watched.mode = "own"
    generate(llm, [request | {"max_tokens": 12} for request in mixed(prompts)])
    generate_aborting(llm, requests, (0, 3, 6))
    for _ in range(2):
        generate(llm, [max(requests, key=lambda request: len(request["prompt"])) | {"max_tokens": 5}])
    result = {
        "truth": [t["ids"] for t in truth],
        "texts": {"": texts},
        "async": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
        "hits": metric(llm, "vllm:prefix_cache_hits"),
        "preempted": metric(llm, "vllm:num_preemptions"),
        "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
        "runner": type(watched.speculator).__name__,
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    {f.__name__: f for f in (every,)}[sys.argv[1]](**json.loads(sys.argv[2]))
