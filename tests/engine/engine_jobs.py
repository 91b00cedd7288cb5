"""Jobs that need a real vLLM, run by conftest.run_job as ``python engine_jobs.py NAME JSON``; each writes JSON."""

import json
import random
import sys
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

K = 7
LENGTHS = (K, K + 1, K + 2, 2 * (K + 1), 3, 1, 25, 40)


def build(target, drafter=None, k=K, **options):
    speculation = None
    if drafter:
        sampling = options.pop("draft_sample_method", None)
        speculation = {"method": "dflash", "model": drafter, "num_speculative_tokens": k}
        speculation |= {"draft_sample_method": sampling} if sampling else {}
    settings = {
        "model": target, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 8,
        "max_model_len": 2304, "max_num_batched_tokens": 256, "block_size": 32, "disable_log_stats": False,
        "enable_prefix_caching": True, "seed": 0, "speculative_config": speculation,
    }  # fmt: skip
    return LLM(**(settings | options))


def prompts(vocab, lengths=LENGTHS):
    draw = random.Random(5)
    return [[draw.randrange(3, vocab - 1) for _ in range(n)] for n in lengths]


def params(request):
    """Sampling parameters of {prompt, ...sampling parameters}, greedy unless told."""
    own = {key: value for key, value in request.items() if key != "prompt"}
    return SamplingParams(**({"temperature": 0, "detokenize": False} | own))


def runner_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def generate(llm, requests):
    """[{ids, reason}] of [{prompt, ...sampling parameters}] given to the engine at once."""
    inputs = [{"prompt_token_ids": request["prompt"]} for request in requests]
    outputs = llm.generate(inputs, [params(request) for request in requests], use_tqdm=False)
    return [{"ids": list(o.outputs[0].token_ids), "reason": o.outputs[0].finish_reason} for o in outputs]


def long_requests(vocab):
    return [{"prompt": p, "max_tokens": 32, "ignore_eos": True} for p in prompts(vocab)]


def cut_requests(truth):
    """Stops inside a block and budgets that end inside one; ``truth`` is the plain continuation of each prompt."""
    (a, first), (b, second), (c, third) = [(t["prompt"], t["ids"]) for t in truth[:3]]
    return [
        {"prompt": a, "max_tokens": 32, "stop_token_ids": [first[4]], "ignore_eos": True},
        {"prompt": b, "max_tokens": 32, "stop_token_ids": [second[9], second[5]], "ignore_eos": True},
        {"prompt": c, "max_tokens": 32, "stop_token_ids": [third[8]], "ignore_eos": True},
        {"prompt": a, "max_tokens": 6, "ignore_eos": True},
        {"prompt": b, "max_tokens": 1, "ignore_eos": True},
        {"prompt": c, "max_tokens": 9, "min_tokens": 9, "stop_token_ids": [third[2]]},
    ]


class Drafts:
    """Stands in front of the proposer: notes what it really proposes, and hands on that or something else."""

    def __init__(self, truth, vocab):
        self.truth = {tuple(t["prompt"]): t["ids"] for t in truth}
        self.vocab, self.mode, self.rounds = vocab, "own", []
        self.draw = random.Random(3)
        self.propose = GPUModelRunner.propose_draft_token_ids
        GPUModelRunner.propose_draft_token_ids = self._wrapped()

    def _wrapped(self):
        def propose(runner, *args, **kwargs):
            real = self.propose(runner, *args, **kwargs)
            proposer, batch = runner.drafter, runner.input_batch
            rows, width = real.shape[0], real.shape[1] + 1
            places = proposer.positions[: rows * width].view(rows, width)[:, 0].tolist()
            anchors = proposer.input_ids[: rows * width].view(rows, width)[:, 0].tolist()
            given = [self._given(batch, row, places[row], real[row].tolist()) for row in range(rows)]
            for row in range(rows):
                prompt = self._prompt(batch, row)
                note = {"prompt": prompt, "place": places[row], "anchor": anchors[row], "draft": real[row].tolist()}
                self.rounds.append(note | {"given": given[row], "mode": self.mode})
            return torch.tensor(given, dtype=real.dtype)

        return propose

    @staticmethod
    def _prompt(batch, row):
        return batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]].tolist()

    def _given(self, batch, row, place, real):
        if self.mode == "own":
            return real
        prompt = self._prompt(batch, row)
        whole = prompt + self.truth.get(tuple(prompt), [])
        right = whole[place + 1 : place + 1 + len(real)]
        right += [5] * (len(real) - len(right))
        kept = {"right": len(real), "wrong": 0, "random": 0, "half": self.draw.randrange(len(real) + 1)}[self.mode]
        if self.mode == "random":
            return [self.draw.randrange(self.vocab) for _ in real]
        return right[:kept] + [(t + 1) % self.vocab for t in right[kept:]]

    def take(self):
        rounds, self.rounds = self.rounds, []
        return rounds


def free_blocks(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def metric(llm, name):
    return next(m.value for m in llm.get_metrics() if m.name == name)


def abort_some(llm, vocab):
    """Twelve prompts twice at temperature 1, every fourth aborted after a few steps."""
    engine = llm.llm_engine
    finished = 0
    for again in range(2):
        for i, prompt in enumerate(prompts(vocab, lengths=range(5, 65, 5))):
            params = SamplingParams(temperature=1, max_tokens=20, detokenize=False, ignore_eos=True)
            engine.add_request(f"{again}-{i}", {"prompt_token_ids": prompt}, params)
        for step in range(400):
            if step == 4:
                engine.abort_request([f"{again}-{i}" for i in range(0, 12, 4)])
            finished += sum(output.finished for output in engine.step())
            if not engine.has_unfinished_requests():
                break
    return finished


def identity(target, drafter, vocab, out):
    """Plain, then speculative with the drafter's own, right, wrong, random and half right drafts."""
    plain = build(target)
    requests = long_requests(vocab)
    truth = [r | o for r, o in zip(requests, generate(plain, requests), strict=True)]
    cuts = cut_requests(truth)
    long_prompt = {"prompt": prompts(vocab, [2000])[0], "max_tokens": 20, "ignore_eos": True}
    result = {"truth": truth, "cuts": generate(plain, cuts), "long": generate(plain, [long_prompt])[0]}
    del plain
    llm = build(target, drafter)
    drafts = Drafts(truth, vocab)
    before = free_blocks(llm)
    result["modes"], result["cut_modes"], result["rounds"] = {}, {}, []
    for drafts.mode in ("own", "right", "wrong", "random", "half"):
        result["modes"][drafts.mode] = generate(llm, requests)
        result["rounds"] += drafts.take()
        result["cut_modes"][drafts.mode] = generate(llm, cuts)
        drafts.take()
    drafts.mode = "own"
    result["batches"] = {n: generate(llm, requests[-n:])[-1] for n in (1, 2, 3)}
    hits = [metric(llm, "vllm:prefix_cache_hits")]
    for _ in range(2):
        result.setdefault("long_again", []).append(generate(llm, [long_prompt])[0])
        hits.append(metric(llm, "vllm:prefix_cache_hits"))
    result |= {"hits": hits, "finished": abort_some(llm, vocab), "blocks": [before, free_blocks(llm)]}
    Path(out).write_text(json.dumps(result))


def blocks(target, drafter, vocab, out):
    """Only what the drafter itself proposes, round by round."""
    llm = build(target, drafter)
    drafts = Drafts([], vocab)
    requests = long_requests(vocab)
    texts = [r | o for r, o in zip(requests, generate(llm, requests), strict=True)]
    Path(out).write_text(json.dumps({"truth": texts, "rounds": drafts.take()}))


def start(target, drafters, out, **options):
    """What every drafter's engine says when it starts; one that does must decode a little, too."""
    said = []
    for drafter in drafters:
        try:
            llm = build(target, drafter, **options)
            generate(
                llm, [{"prompt": [5, 6, 7], "max_tokens": 12, "temperature": t, "ignore_eos": True} for t in (0, 1)]
            )
            del llm  # two in one process would end each other's groups
            said.append("started")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    Path(out).write_text(json.dumps({"said": said}))


def sampled(target, drafter, prompt, samples, out):
    """Second and third tokens at temperature 1, with and without the mend, unwritten memory made to read 3."""
    from vllm.v1.sample import rejection_sampler

    llm = build(target, drafter, k=3, draft_sample_method="probabilistic", max_num_seqs=64, max_model_len=64)
    mended = rejection_sampler.expand_kernel._impl
    shipped = mended.dflash_plugins_state.shipped
    result = {}
    for name, kernel in (("mended", mended), ("shipped", shipped)):

        def poisoned(output, *rest, kernel=kernel):
            output.fill_(3)
            kernel(output, *rest)

        rejection_sampler.expand_kernel._impl = poisoned
        request = {"prompt": prompt, "temperature": 1, "max_tokens": 3, "ignore_eos": True}
        result[name] = [o["ids"] for o in generate(llm, [request] * samples)]
    result["accepted"] = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    Path(out).write_text(json.dumps(result))


def features(target, layers, vocab, out):
    """Rows that the recorder takes while the engine answers, with chunked prefill and requests of other lengths."""
    from vllm_ext.collect import FeatureRecorder

    options = {"max_model_len": 128, "max_num_batched_tokens": 32, "enable_prefix_caching": False}
    llm = build(target, async_scheduling=False, **options)
    recorder = FeatureRecorder(runner_of(llm), layers)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts(vocab)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
    found = []
    for prompt, output in zip(inputs, llm.generate(inputs, params, use_tqdm=False), strict=True):
        ids = prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)
        found.append({"ids": ids, "rows": recorder.take(output.request_id).tolist()})
    recorder.close()
    Path(out).write_text(json.dumps({"found": found, "left": len(recorder.rows)}))


if __name__ == "__main__":
    {f.__name__: f for f in (identity, blocks, start, sampled, features)}[sys.argv[1]](**json.loads(sys.argv[2]))
