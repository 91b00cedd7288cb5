"""Jobs that start a real SGLang on a CPU, run by conftest.run_sglang as ``python sglang_jobs.py NAME JSON``.

SGLang spawns processes that import this file again, so nothing may happen at its import.
"""

import asyncio
import json
import sys
from pathlib import Path

SETTINGS = ("chunked_prefill_size", "disable_overlap_schedule", "disable_radix_cache", "speculative_draft_window_size")


def build(target, drafter=None, k=None, **options):
    """An engine in this process with its scheduler in another; fp32 and token ids, unless told."""
    import sglang

    settings = {
        "model_path": target, "device": "cpu", "dtype": "float32", "attention_backend": "torch_native",
        "disable_cuda_graph": True, "grammar_backend": "none", "mem_fraction_static": 0.1, "max_total_tokens": 8192,
        "max_running_requests": 24, "skip_tokenizer_init": True, "log_level": "info", "random_seed": 0,
        "sleep_on_idle": True,
    }  # fmt: skip
    if drafter:
        settings |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter}
        settings |= {"speculative_num_draft_tokens": k + 1} if k else {}
    return sglang.Engine(**(settings | options))


def generate(engine, requests):
    """[{ids, reason, rounds, cached}] of [{prompt, ...sampling parameters of SGLang}] given to the engine at once."""
    outputs = engine.generate(
        input_ids=[request["prompt"] for request in requests], sampling_params=[params(one) for one in requests]
    )
    return [answer(output) for output in outputs]


def params(request):
    """Sampling parameters of {prompt, ...}, greedy unless told."""
    return {"temperature": 0} | {name: value for name, value in request.items() if name != "prompt"}


def answer(output):
    about = output["meta_info"]
    return {
        "ids": output["output_ids"],
        "reason": (about["finish_reason"] or {}).get("type"),
        "rounds": about.get("spec_verify_ct"),
        "cached": about.get("cached_tokens"),
    }


def texts(target, requests, out, drafter=None, k=None, waves=1, **options):
    """The requests ``waves`` times, one wave after the other, with one engine."""
    engine = build(target, drafter, k, **options)
    try:
        result = [generate(engine, requests) for _ in range(waves)]
    finally:
        engine.shutdown()
    Path(out).write_text(json.dumps({"waves": result}))


def waves(target, waves, out, drafter=None, k=None, **options):
    """Waves one after the other with one engine: {name: {"requests": [...], "aborted": [...]}}, answered by name.

    Requests are known to ``sglang_watch`` as NAME/NUMBER, those that are given up half-way as NAME/aborted-NUMBER.
    """
    engine = build(target, drafter, k, **options)
    try:
        answers = {name: engine.loop.run_until_complete(together(engine, name, **wave)) for name, wave in waves.items()}
        settings = engine.get_server_info()
    finally:
        engine.shutdown()
    found = {
        "waves": {name: wave["kept"] for name, wave in answers.items()},
        "aborted": {name: wave["aborted"] for name, wave in answers.items()},
        "settings": {name: settings[name] for name in SETTINGS},
    }
    Path(out).write_text(json.dumps(found))


async def together(engine, wave, requests, aborted=()):
    """All at once, the ones to be given up in between the others."""
    asked = []
    for i, request in enumerate(requests):
        asked.append(asyncio.ensure_future(ask(engine, f"{wave}/{i}", request)))
        if i < len(aborted):
            # The first one before it has said anything.
            asked.append(asyncio.ensure_future(ask(engine, f"{wave}/aborted-{i}", aborted[i], pieces=i)))
        await asyncio.sleep(0)
    done = [(task, await task) for task in asked]
    given_up = set(asked[1 : 2 * len(aborted) : 2])
    return {
        "kept": [one for task, one in done if task not in given_up],
        "aborted": [one for task, one in done if task in given_up],
    }


async def ask(engine, name, request, pieces=None):
    """The answer; with ``pieces`` it is read piece by piece and given up after so many of them."""
    stream = pieces is not None
    given = {"input_ids": request["prompt"], "sampling_params": params(request), "rid": name, "stream": stream}
    if not stream:
        return answer(await engine.async_generate(**given))
    seen = []
    if pieces == 0:
        asyncio.get_running_loop().call_later(0.05, engine.tokenizer_manager.abort_request, name)
    async for output in await engine.async_generate(**given):
        seen.append(answer(output))
        if len(seen) == pieces:
            engine.tokenizer_manager.abort_request(name)
    return seen[-1]


if __name__ == "__main__":
    {f.__name__: f for f in (texts, waves)}[sys.argv[1]](**json.loads(sys.argv[2]))
