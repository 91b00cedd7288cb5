"""Jobs with an audited engine, run by conftest.run_job with ``DFLASH_PLUGINS_AUDIT`` set; each writes JSON."""

import json
import random
import sys
from pathlib import Path

from engine_jobs import Drafts, build, generate, metric, prompts
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.dflash import DFlashProposer

# Fewer rows in a step than eight requests want, so that prompts come in chunks, drafts are cut and requests sit out;
# fewer pages than they want, so that some are preempted.
SIZES = {
    "max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 40, "block_size": 32,
    "num_gpu_blocks_override": 11,
}  # fmt: skip
LENGTHS = (7, 8, 9, 16, 3, 1, 70, 40)


def requests_of(vocab):
    return [{"prompt": p, "max_tokens": 24, "ignore_eos": True} for p in prompts(vocab, LENGTHS)]


def mixed(vocab):
    """Greedy, sampled, penalised and masked requests in one batch. No seeds: with a prompt chunk they crash the engine."""
    rules = (
        {}, {"temperature": 1}, {"temperature": 0.8, "top_k": 5}, {"temperature": 1, "top_p": 0.6},
        {"temperature": 0.7, "repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"min_tokens": 20},
        {"temperature": 1, "frequency_penalty": 0.4},
    )  # fmt: skip
    return [request | rule for request, rule in zip(requests_of(vocab), rules, strict=True)]


def abort_some(llm, vocab):
    """Eight requests at temperature 1, every third given up after three steps."""
    engine = llm.llm_engine
    for i, request in enumerate(requests_of(vocab)):
        params = SamplingParams(temperature=1, max_tokens=12, detokenize=False, ignore_eos=True)
        engine.add_request(f"given-up-{i}", {"prompt_token_ids": request["prompt"]}, params)
    for step in range(400):
        if step == 3:
            engine.abort_request([f"given-up-{i}" for i in range(0, 8, 3)])
        engine.step()
        if not engine.has_unfinished_requests():
            break


def every(target, drafter, vocab, out, draft_sample_method=None, async_scheduling=None):
    """All that a run meets: chunks, prefix hits, preemption, cut drafts, aborts, greedy and sampled together."""
    options = {"draft_sample_method": draft_sample_method} if draft_sample_method else {}
    if async_scheduling is not None:
        options["async_scheduling"] = async_scheduling
    plain = build(target, **SIZES)
    truth = [r | o for r, o in zip(requests_of(vocab), generate(plain, requests_of(vocab)), strict=True)]
    del plain
    llm = build(target, drafter, **SIZES, **options)
    drafts = Drafts(truth, vocab)
    texts = {}
    # Half right drafts only where the rejection sampler is told nothing of how they were drawn.
    for drafts.mode in ("own", "half") if draft_sample_method is None else ("own",):
        texts[drafts.mode] = [o["ids"] for o in generate(llm, requests_of(vocab))]
        generate(llm, mixed(vocab))
    abort_some(llm, vocab)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    result = {
        "truth": [t["ids"] for t in truth],
        "texts": texts,
        "async": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
        "hits": metric(llm, "vllm:prefix_cache_hits"),
        "preempted": metric(llm, "vllm:num_preemptions"),
        "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
        "proposer": type(runner.drafter).__name__,
    }
    Path(out).write_text(json.dumps(result))


class Fault:
    """Breaks one thing of the engine in every tenth step that offers itself, beneath whatever observes the engine."""

    def __init__(self, name):
        self.steps = 0
        getattr(self, name)()

    def due(self):
        self.steps += 1
        return self.steps % 10 == 0

    def emitted(self):
        """One emitted id is another one."""
        shipped = rejection_sampler.rejection_sample

        def rejection_sample(*args, **kwargs):
            ids = shipped(*args, **kwargs)
            if self.due():
                ids[0, 0] = (ids[0, 0] + 1) % 500
            return ids

        rejection_sampler.rejection_sample = rejection_sample

    def context_length(self):
        """The drafter's attention reads one row too few."""
        shipped = DFlashProposer.set_inputs_first_pass

        def set_inputs_first_pass(proposer, **named):
            count, indices, context = shipped(proposer, **named)
            if self.due():
                context.seq_lens[0] -= 1
            return count, indices, context

        DFlashProposer.set_inputs_first_pass = set_inputs_first_pass

    def context_rows(self):
        """One rejected row too many becomes context."""
        shipped = DFlashProposer.prepare_inputs_padded

        def prepare_inputs_padded(*args, **kwargs):
            metadata, indices, rejected = shipped(*args, **kwargs)
            if int(rejected[0]) and self.due():
                rejected[0] -= 1
            return metadata, indices, rejected

        DFlashProposer.prepare_inputs_padded = prepare_inputs_padded

    def accepted(self):
        """A rejected draft and what came after it are emitted."""
        shipped = rejection_sampler.rejection_sample

        def rejection_sample(drafted, counts, *rest, **kwargs):
            ids = shipped(drafted, counts, *rest, **kwargs)
            if counts[0] and int(ids[0, counts[0]]) == -1 and self.due():
                ids[0, : counts[0]] = drafted[: counts[0]]
                ids[0, counts[0]] = 5
            return ids

        rejection_sampler.rejection_sample = rejection_sample


def planted(target, drafter, vocab, out, fault):
    """Greedy requests on an engine that does one thing wrong now and then."""
    planted_fault = Fault(fault)
    random.seed(0)
    llm = build(target, drafter, max_num_seqs=8, max_model_len=256)
    generate(llm, requests_of(vocab))
    Path(out).write_text(json.dumps({"planted": planted_fault.steps // 10}))


if __name__ == "__main__":
    {f.__name__: f for f in (every, planted)}[sys.argv[1]](**json.loads(sys.argv[2]))
