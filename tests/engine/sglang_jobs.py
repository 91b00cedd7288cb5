"""Jobs that start a real SGLang on a CPU, run by conftest.run_sglang as ``python sglang_jobs.py NAME JSON``.

SGLang spawns processes that import this file again, so nothing may happen at its import.
"""

import json
import sys
from pathlib import Path


def build(target, drafter=None, k=None, **options):
    """An engine in this process with its scheduler in another; fp32 and token ids, unless told."""
    import sglang

    settings = {
        "model_path": target, "device": "cpu", "dtype": "float32", "attention_backend": "torch_native",
        "disable_cuda_graph": True, "grammar_backend": "none", "mem_fraction_static": 0.1, "max_total_tokens": 8192,
        "max_running_requests": 24, "skip_tokenizer_init": True, "log_level": "info", "random_seed": 0,
    }  # fmt: skip
    if drafter:
        settings |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter}
        settings |= {"speculative_num_draft_tokens": k + 1} if k else {}
    return sglang.Engine(**(settings | options))


def generate(engine, requests):
    """[{ids, reason, rounds, accepted}] of [{prompt, ...sampling parameters of SGLang}] given to the engine at once."""
    params = [{"temperature": 0} | {k: v for k, v in request.items() if k != "prompt"} for request in requests]
    outputs = engine.generate(input_ids=[request["prompt"] for request in requests], sampling_params=params)
    return [
        {
            "ids": output["output_ids"],
            "reason": (output["meta_info"]["finish_reason"] or {}).get("type"),
            "rounds": output["meta_info"].get("spec_verify_ct"),
            "cached": output["meta_info"].get("cached_tokens"),
        }
        for output in outputs
    ]


def texts(target, requests, out, drafter=None, k=None, waves=1, **options):
    """The requests ``waves`` times, one wave after the other, with one engine."""
    engine = build(target, drafter, k, **options)
    try:
        result = [generate(engine, requests) for _ in range(waves)]
    finally:
        engine.shutdown()
    Path(out).write_text(json.dumps({"waves": result}))


if __name__ == "__main__":
    {f.__name__: f for f in (texts,)}[sys.argv[1]](**json.loads(sys.argv[2]))
