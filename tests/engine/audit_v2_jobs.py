"""Jobs with an audited engine on vLLM's V2 runner; see audit_jobs.py."""

import functools
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

import audit_jobs  # isort: skip
from audit_jobs import allow_async_scheduling, mixed, requests_of  # isort: skip
from vllm.v1.worker.gpu.spec_decode import rejection_sampler  # isort: skip
from vllm.v1.worker.gpu.spec_decode.dflash import speculator  # isort: skip

from vllm_ext.hooks import DRAFTER_ARGUMENTS  # isort: skip

SIZES = OPTIONS | {"max_num_seqs": 8, "max_model_len": 160, "max_num_batched_tokens": 44, "num_gpu_blocks_override": 7}


def without_top(request):
    """Less top-k and top-p, whose kernel the interpreter cannot run."""
    return {name: value for name, value in request.items() if name not in ("top_k", "top_p")}


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
    generate(llm, [without_top(request) | {"max_tokens": 12} for request in mixed(prompts)])
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


class Faults(audit_jobs.Faults):
    """The same faults as on the V1 runner, where the V2 runner does these things."""

    def break_sampler(self):
        shipped = rejection_sampler.rejection_sample

        @functools.wraps(shipped)
        def rejection_sample(logits, draft_logits, drafted, ends, *rest, **named):
            ids, counts = shipped(logits, draft_logits, drafted, ends, *rest, **named)
            rows = int(ends[1])
            if self.due("emitted"):
                ids[0, 0] = (ids[0, 0] + 1) % 200
            if int(counts[0]) < rows and int(drafted[1]) >= 0 and self.due("accepted"):
                ids[0, : rows - 1] = drafted[1:rows]
                ids[0, rows - 1] = 5
                counts[0] = rows
            return ids, counts

        rejection_sampler.rejection_sample = rejection_sample

    def break_proposer(self):
        shipped, rejected = speculator.prepare_dflash_inputs, DRAFTER_ARGUMENTS.index("num_rejected")

        @functools.wraps(shipped)
        def prepare_dflash_inputs(buffers, *args):
            counts = args[rejected - 1]
            if int(counts[0]) and self.due("context_rows"):
                counts[0] -= 1  # the engine has counted by it before
            shipped(buffers, *args)
            buffers.seq_lens[0] -= int(self.due("context_length"))
            buffers.input_ids[0] += int(self.due("anchor"))
            if self.due("mask_rows"):
                buffers.input_ids[2] = 7

        speculator.prepare_dflash_inputs = prepare_dflash_inputs


planted = functools.partial(audit_jobs.planted, faults=Faults, max_num_batched_tokens=64)

if __name__ == "__main__":
    {"every": every, "planted": planted}[sys.argv[1]](**json.loads(sys.argv[2]))
