"""Jobs on vLLM's V2 runner, run by conftest.run_job as ``python v2_jobs.py NAME JSON``; each writes JSON."""

import json
import random
import sys
from pathlib import Path

import v2_interpreter

v2_interpreter.activate()

import torch  # noqa: E402
from engine_jobs import K, build, cut_requests, free_blocks, generate, metric, prompts  # noqa: E402
from vllm import SamplingParams  # noqa: E402

LENGTHS = (K, K + 1, K + 2, 2 * (K + 1), 3, 1, 25, 100)
OPTIONS = {"max_model_len": 256, "max_num_batched_tokens": 64}


class Watched:
    """Stands around the speculator: notes every round, pass by pass, and hands on its drafts or something else."""

    def __init__(self, llm, truth=()):
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self.speculator, self.states = runner.speculator, runner.req_states
        self.truth = {tuple(t["prompt"]): t["ids"] for t in truth}
        self.mode, self.rounds, self.passes, self.draw = "own", [], [], random.Random(3)
        self._propose, self._run_model = self.speculator.propose, self.speculator._run_model
        self.speculator.propose, self.speculator._run_model = self.propose, self.run_model

    def run_model(self, num_tokens, *args):
        self.passes.append(self.speculator.input_buffers.input_ids[:num_tokens].tolist())
        return self._run_model(num_tokens, *args)

    def propose(self, batch, *args, **kwargs):
        self.passes = []
        real = self._propose(batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return real
        notes = [self.note(row, int(batch.idx_mapping[row]), real[row].tolist()) for row in range(batch.num_reqs)]
        self.rounds += notes
        return torch.tensor([self.given(note) for note in notes], dtype=real.dtype)

    def note(self, row, request, draft):
        first, last = row * (K + 1), (row + 1) * (K + 1)
        length = int(self.states.prompt_len.np[request])
        kept = self.speculator.draft_logits
        return {
            "prompt": self.states.all_token_ids.gpu[request, :length].tolist(),
            "place": int(self.speculator.input_buffers.positions[first]),
            "passes": [ids[first:last] for ids in self.passes],
            "draft": draft,
            "kept": None if kept is None else kept[request].tolist(),
        }

    def given(self, note):
        if self.mode == "own":
            return note["draft"]
        whole = note["prompt"] + self.truth[tuple(note["prompt"])]
        right = whole[note["place"] + 1 : note["place"] + 1 + K]
        right += [5] * (K - len(right))
        kept = K if self.mode == "right" else self.draw.randrange(K + 1)
        return right[:kept] + [(token + 1) % 90 for token in right[kept:]]

    def take(self):
        rounds, self.rounds = self.rounds, []
        return rounds


def generate_aborting(llm, requests, aborted):
    """As ``generate``, every request of ``aborted`` given up after three steps; what the others became."""
    engine, done = llm.llm_engine, {}
    for number, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
        engine.add_request(f"request-{number}", {"prompt_token_ids": request["prompt"]}, params)
    step = 0
    while engine.has_unfinished_requests():
        if step == 3:
            engine.abort_request([f"request-{number}" for number in aborted])
        for output in engine.step():
            done[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return [done.get(f"request-{number}") for number in range(len(requests))]


def greedy(target, drafter, vocab, out):
    """24 requests plain, then with half right drafts; stops and budgets with right ones; aborts with its own."""
    plain = build(target, max_num_seqs=24, **OPTIONS)
    requests = [{"prompt": p, "max_tokens": 20, "ignore_eos": True} for p in prompts(vocab, LENGTHS * 3)]
    truth = [r | o for r, o in zip(requests, generate(plain, requests), strict=True)]
    cuts = cut_requests(truth)
    result = {"truth": truth, "cuts": [generate(plain, cuts)]}
    del plain
    llm = build(target, drafter, max_num_seqs=24, **OPTIONS)
    before = free_blocks(llm)
    watched = Watched(llm, truth)
    watched.mode = "half"
    result |= {"half": generate(llm, requests), "rounds": watched.take()}
    watched.mode = "right"
    result["cuts"].append(generate(llm, cuts))
    watched.mode = "own"
    result["aborted"] = generate_aborting(llm, requests[:8], (0, 4))
    result |= {"blocks": [before, free_blocks(llm)], "hits": metric(llm, "vllm:prefix_cache_hits")}
    result["runner"] = type(watched.speculator).__name__
    Path(out).write_text(json.dumps(result))


def sampled(target, drafter, vocab, out):
    """Rounds with probabilistic drafts, one request of them greedy; then the dummy blocks of a capture."""
    llm = build(target, drafter, draft_sample_method="probabilistic", max_num_seqs=8, **OPTIONS)
    watched = Watched(llm)
    requests = [
        {"prompt": p, "max_tokens": 8, "ignore_eos": True, "temperature": min(n, 1), "seed": n}
        for n, p in enumerate(prompts(vocab, LENGTHS[:7]))
    ]
    texts = [r | o for r, o in zip(requests, generate(llm, requests), strict=True)]
    result = {"texts": texts, "rounds": watched.take()}
    speculator = watched.speculator
    before = speculator.draft_logits.clone()
    speculator.sample_indices.zero_()
    speculator.sample_pos.zero_()
    speculator.sample_idx_mapping.fill_(-1)
    with torch.inference_mode():
        speculator._generate_draft(8, 8 * (K + 1), None, None, None)
    result["untouched"] = bool(torch.equal(before, speculator.draft_logits))
    result["in_range"] = bool(((speculator.draft_tokens >= 0) & (speculator.draft_tokens < vocab)).all())
    Path(out).write_text(json.dumps(result))


def side_by_side(target, drafters, vocab, out):
    """What every drafter drafts for the same requests, one of them greedy."""
    found = []
    for drafter in drafters:
        llm = build(target, drafter, draft_sample_method="probabilistic", max_num_seqs=4, **OPTIONS)
        watched = Watched(llm)
        shared = {"max_tokens": 6, "ignore_eos": True}
        requests = [
            shared | {"prompt": p, "temperature": min(n, 1), "seed": n} for n, p in enumerate(prompts(vocab, (8, 9, 3)))
        ]
        generate(llm, requests)
        found.append(watched.take())
        del llm, watched
    Path(out).write_text(json.dumps({"rounds": found}))


def trained_pair(target, drafter, requests, out):
    """The same texts plain and with a drafter that is mostly right; they end where the model's own EOS comes."""
    result = {}
    for name, own in (("plain", None), ("speculative", drafter)):
        llm = build(target, own, max_num_seqs=len(requests), **OPTIONS)
        result[name] = generate(llm, requests)
        if own:
            drafts = metric(llm, "vllm:spec_decode_num_drafts")
            result["emitted"] = 1 + metric(llm, "vllm:spec_decode_num_accepted_tokens") / drafts
        del llm
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    {f.__name__: f for f in (greedy, sampled, side_by_side, trained_pair)}[sys.argv[1]](**json.loads(sys.argv[2]))
