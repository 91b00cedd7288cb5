"""Jobs that hold every method's text and drafts against plain decoding; see engine_jobs.py for how they are run."""

import json
import sys
from pathlib import Path

from engine_jobs import Drafts, build, free_blocks, metric, params, runner_of

# Less room in a step than the requests want, so that prompts come in chunks and running requests wait. One takes
# K + 1 rows and K more for drafting: 8 of them leave 12, in which one more has only some of its proposals verified.
SIZES = {
    "max_num_seqs": 24, "max_model_len": 256, "max_num_batched_tokens": 132, "block_size": 32,
    "logprobs_mode": "raw_logits",
}  # fmt: skip
STEPS = 2000


def answers(llm, requests, aborted=(), after=4):
    """Ids, reason and, where asked for, the best logits of each position; ``aborted`` requests run ``after`` steps."""
    engine, done = llm.llm_engine, {}
    for i, request in enumerate(requests):
        engine.add_request(f"kept-{i}", {"prompt_token_ids": request["prompt"]}, params(request))
        if i < len(aborted):
            engine.add_request(f"aborted-{i}", {"prompt_token_ids": aborted[i]["prompt"]}, params(aborted[i]))
    for step in range(STEPS):
        if step == after:
            engine.abort_request([f"aborted-{i}" for i in range(len(aborted))])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
        if not engine.has_unfinished_requests():
            break
    return [answer(done[f"kept-{i}"]) for i in range(len(requests))]


def answer(output):
    best = [[[token, one.logprob] for token, one in row.items()] for row in output.logprobs or []]
    return {"ids": list(output.token_ids), "reason": output.finish_reason, "best": best}


def plain(target, requests, out, cuts=None):
    """The plain text of ``requests``; then of the requests made of it where texts are cut inside a block."""
    llm = build(target, **SIZES)
    texts = answers(llm, [request | {"logprobs": 5} for request in requests])
    cut = cut_requests(requests, texts)
    result = {"texts": texts, "cut": cut, "cut_texts": answers(llm, [request | {"logprobs": 5} for request in cut])}
    Path(out).write_text(json.dumps(result))


def cut_requests(requests, texts):
    """Every text once more: ended by the model's own EOS, by a stop token somewhere inside it, or by its budget."""
    cut = []
    for i, (request, text) in enumerate(zip(requests, texts, strict=True)):
        one, place = {"prompt": request["prompt"], "max_tokens": request["max_tokens"]}, 1 + i % 11
        kinds = (
            {},
            {"stop_token_ids": [text["ids"][place]], "ignore_eos": True},
            {"max_tokens": place, "ignore_eos": True},
            {"stop_token_ids": [text["ids"][place]], "min_tokens": place + 3, "ignore_eos": True},
        )
        cut.append(one | kinds[i % len(kinds)])
    return cut


def emitted(llm):
    """Mean tokens per round since the engine began: accepted and one more."""
    drafts = metric(llm, "vllm:spec_decode_num_drafts")
    return 1 + metric(llm, "vllm:spec_decode_num_accepted_tokens") / drafts


def served(target, drafter, requests, cut, sampled, vocab, out):
    """The same requests again and again: among aborted ones, cut, from the prefix cache, and among sampled ones."""
    llm = build(target, drafter, draft_sample_method="probabilistic", **SIZES)
    drafts, before = Drafts([], vocab), free_blocks(llm)
    result = {"waves": {}, "rounds": {}}

    def wave(name, *args, **kwargs):
        result["waves"][name] = answers(llm, *args, **kwargs)
        result["rounds"][name] = drafts.take()

    wave("aborts", requests, aborted=sampled[:8])
    result["emitted"] = emitted(llm)
    wave("cuts", cut)
    hits = metric(llm, "vllm:prefix_cache_hits")
    wave("prefix cache", requests)
    result["hits"] = metric(llm, "vllm:prefix_cache_hits") - hits
    proposer = runner_of(llm).drafter
    for proposer._enable_probabilistic_draft_probs, name in ((True, "drawn drafts"), (False, "greedy drafts")):
        mixed = answers(llm, [one for pair in zip(requests, sampled, strict=True) for one in pair])
        result["waves"][name], result["rounds"][name] = mixed[::2], drafts.take()
    result["blocks"] = [before, free_blocks(llm)]
    Path(out).write_text(json.dumps(result))


def fewer(target, drafter, requests, k, vocab, out):
    """Served with another K than the drafter was trained for, and with the engine's own choice of how to draft."""
    llm = build(target, drafter, k=k, **SIZES)
    drafts = Drafts([], vocab)
    texts = answers(llm, requests)
    Path(out).write_text(json.dumps({"texts": texts, "rounds": drafts.take(), "emitted": emitted(llm)}))


if __name__ == "__main__":
    {f.__name__: f for f in (plain, served, fewer)}[sys.argv[1]](**json.loads(sys.argv[2]))
