"""Jobs with an audited engine, run by conftest.run_job with ``DFLASH_PLUGINS_AUDIT`` set; each writes JSON."""

import functools
import json
import sys
from pathlib import Path

from engine_jobs import Drafts, build, generate, metric
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.dflash import DFlashProposer

from dflash_plugins import audit

# Fewer rows in a step than eight requests want, so that prompts come in chunks, drafts are cut and requests sit out;
# fewer pages than they want, so that some are preempted.
SIZES = {
    "max_num_seqs": 8, "max_model_len": 160, "max_num_batched_tokens": 44, "block_size": 32,
    "num_gpu_blocks_override": 9,
}  # fmt: skip


def requests_of(prompts):
    return [{"prompt": p, "max_tokens": 44, "ignore_eos": True} for p in prompts]


def mixed(prompts):
    """Greedy, sampled, penalised and masked requests in one batch.

    Without seeds, as a seeded prompt chunk crashes the engine on a CPU; and with no top-k alone, as vLLM 0.32.0 crashes
    in a step that has it and no proposal.
    """
    rules = (
        {}, {"temperature": 1}, {"temperature": 0.8, "top_k": 5, "top_p": 0.95}, {"temperature": 1, "top_p": 0.6},
        {"temperature": 0.7, "repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"min_tokens": 10},
        {"temperature": 1, "frequency_penalty": 0.4},
    )  # fmt: skip
    return [request | rule for request, rule in zip(requests_of(prompts), rules, strict=True)]


def abort_some(llm, prompts):
    """Eight requests at temperature 1, every third given up after three steps."""
    engine = llm.llm_engine
    for i, request in enumerate(requests_of(prompts)):
        params = SamplingParams(temperature=1, max_tokens=12, detokenize=False, ignore_eos=True)
        engine.add_request(f"given-up-{i}", {"prompt_token_ids": request["prompt"]}, params)
    for step in range(400):
        if step == 3:
            engine.abort_request([f"given-up-{i}" for i in range(0, 8, 3)])
        engine.step()
        if not engine.has_unfinished_requests():
            break


def allow_async_scheduling():
    """The CPU platform turns it off as not needed; the audit must follow it all the same."""
    from vllm.platforms.cpu import CpuPlatform

    shipped = CpuPlatform.check_and_update_config

    def check_and_update_config(platform, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        shipped(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def every(target, drafter, prompts, vocab, out, draft_sample_method=None, async_scheduling=False):
    """All that a run meets: chunks, prefix hits, preemption, cut drafts, aborts, greedy and sampled together."""
    options = {"draft_sample_method": draft_sample_method} if draft_sample_method else {}
    if async_scheduling:
        allow_async_scheduling()
    plain = build(target, **SIZES)
    truth = [r | o for r, o in zip(requests_of(prompts), generate(plain, requests_of(prompts)), strict=True)]
    del plain
    llm = build(target, drafter, async_scheduling=async_scheduling, **SIZES, **options)
    drafts = Drafts(truth, vocab)
    texts = {}
    # Half right drafts only where the rejection sampler is told nothing of how they were drawn.
    for drafts.mode in ("own", "half") if draft_sample_method is None else ("own",):
        texts[drafts.mode] = [o["ids"] for o in generate(llm, requests_of(prompts))]
        generate(llm, mixed(prompts))
    abort_some(llm, prompts)
    for _ in range(2):
        generate(llm, [max(requests_of(prompts), key=lambda request: len(request["prompt"]))])
    result = {
        "truth": [t["ids"] for t in truth],
        "texts": texts,
        "async": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
        "hits": metric(llm, "vllm:prefix_cache_hits"),
        "preempted": metric(llm, "vllm:num_preemptions"),
        "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
        "requests": 8 * (2 * len(texts) + 1) + 2,
    }
    Path(out).write_text(json.dumps(result))


class Faults:
    """Breaks one thing of the engine in every fifth step that offers itself, beneath whatever observes the engine."""

    NAMES = ("emitted", "accepted", "context_length", "context_rows", "anchor", "mask_rows")

    def __init__(self):
        self.name, self.steps = None, 0
        self.break_sampler()
        self.break_proposer()

    def due(self, name):
        if name != self.name:
            return False
        self.steps += 1
        return self.steps % 5 == 0

    def break_sampler(self):
        """One emitted id is another one; or rejected proposals are emitted, and a token after them."""
        shipped = rejection_sampler.rejection_sample

        @functools.wraps(shipped)
        def rejection_sample(drafted, counts, *rest, **kwargs):
            ids = shipped(drafted, counts, *rest, **kwargs)
            if self.due("emitted"):
                ids[0, 0] = (ids[0, 0] + 1) % 200
            if counts[0] and int(ids[0, counts[0]]) == -1 and int(drafted[0]) >= 0 and self.due("accepted"):
                ids[0, : counts[0]] = drafted[: counts[0]]
                ids[0, counts[0]] = 5
            return ids

        rejection_sampler.rejection_sample = rejection_sample

    def break_proposer(self):
        """The drafter reads a context row too few, keeps one too many, or gets another anchor, or one mask too few."""
        inputs, padded, anchors = (
            getattr(DFlashProposer, name)
            for name in ("set_inputs_first_pass", "prepare_inputs_padded", "prepare_next_token_ids_padded")
        )

        @functools.wraps(inputs)
        def set_inputs_first_pass(proposer, **named):
            count, indices, context = inputs(proposer, **named)
            if self.due("context_length"):
                context.seq_lens[0] -= 1
            if self.due("mask_rows"):
                proposer.input_ids[2] = 7
            return count, indices, context

        @functools.wraps(padded)
        def prepare_inputs_padded(*args, **kwargs):
            metadata, indices, rejected = padded(*args, **kwargs)
            if int(rejected[0]) and self.due("context_rows"):
                rejected[0] -= 1
            return metadata, indices, rejected

        @functools.wraps(anchors)
        def prepare_next_token_ids_padded(*args, **kwargs):
            ids, counts = anchors(*args, **kwargs)
            if self.due("anchor"):
                ids[0] = (ids[0] + 1) % 200
            return ids, counts

        DFlashProposer.set_inputs_first_pass = set_inputs_first_pass
        DFlashProposer.prepare_inputs_padded = prepare_inputs_padded
        DFlashProposer.prepare_next_token_ids_padded = prepare_next_token_ids_padded


def planted(target, drafter, prompts, vocab, out, faults=Faults, **sizes):
    """One wave of greedy requests after the other, on an engine that does one thing wrong now and then."""
    planting, file, result = faults(), audit.requested(), {}
    llm = build(target, drafter, **({"max_num_seqs": 8, "max_model_len": 160} | sizes))
    for planting.name in (None, *Faults.NAMES):
        planting.steps = 0
        written = len(audit.read(file)[1]) if planting.name else 0
        generate(llm, [request | {"max_tokens": 24} for request in requests_of(prompts)])
        result[planting.name or "none"] = {"planted": planting.steps // 5, "lines": audit.read(file)[1][written:]}
    Path(out).write_text(json.dumps(result))


def changed(target, drafter, out):
    """What an engine says when it starts, one of whose functions is another one than the audit knows."""
    shipped = rejection_sampler.rejection_sample
    rejection_sampler.rejection_sample = lambda whatever: shipped(whatever)
    try:
        build(target, drafter, max_num_seqs=8, max_model_len=160)
        said = "started"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(out).write_text(json.dumps({"said": said}))


if __name__ == "__main__":
    {f.__name__: f for f in (every, planted, changed)}[sys.argv[1]](**json.loads(sys.argv[2]))
