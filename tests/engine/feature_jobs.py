"""Jobs of one engine feature each, run by conftest.run_job as ``python feature_jobs.py NAME JSON``; all write JSON."""

import json
import sys
from pathlib import Path

from engine_jobs import K, build, metric
from vllm import EngineArgs, SamplingParams
from vllm.platforms.cpu import CpuPlatform


class Watcher:
    """Mixed into every worker by ``worker_extension_cls``: notes what its proposer drafts, and for which prompt."""

    def watch(self):
        proposer, self.noted = self.model_runner.drafter, []
        shipped = proposer.propose

        def propose(*args, **kwargs):
            drafts = shipped(*args, **kwargs)
            width = getattr(proposer, "block_k", proposer.num_speculative_tokens) + 1
            places = proposer.positions[: width * len(drafts) : width].tolist()
            self.noted += [[self.prompt(row), places[row], draft] for row, draft in enumerate(drafts.tolist())]
            return drafts

        proposer.propose = propose

    def prompt(self, row):
        batch = self.model_runner.input_batch
        return batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]].tolist()

    def noted_drafts(self):
        noted, self.noted = self.noted, []
        return noted


def answers(llm, requests):
    """Ids of the greedy answers to [{prompt, max_tokens}], given to the engine at once."""
    inputs = [{"prompt_token_ids": one["prompt"]} for one in requests]
    rules = [
        SamplingParams(temperature=0, max_tokens=one["max_tokens"], ignore_eos=True, detokenize=False)
        for one in requests
    ]
    return [list(one.outputs[0].token_ids) for one in llm.generate(inputs, rules, use_tqdm=False)]


def run(target, drafter, requests, options):
    """What two waves of the same requests become, what every rank drafts on the way, and facts of the engine."""
    options = dict(options)
    if speculation := options.pop("speculation", None):
        own = {"method": "dflash", "model": drafter, "num_speculative_tokens": K}
        options["speculative_config"] = own | speculation
    llm = build(target, drafter, worker_extension_cls="feature_jobs.Watcher", **options)
    result = {"async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling, "waves": [], "drafts": []}
    if drafter:
        llm.collective_rpc("watch")
    for _ in range(2):
        result["waves"].append(answers(llm, requests))
        if drafter:
            result["drafts"].append(llm.collective_rpc("noted_drafts"))
    result["hits"] = metric(llm, "vllm:prefix_cache_hits")
    if drafter:
        result["accepted"] = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    llm.llm_engine.engine_core.shutdown()
    return result


def keep_async_scheduling():
    """The engine's CPU platform switches it off; its V1 runner can do it all the same."""
    shipped = CpuPlatform.check_and_update_config.__func__

    def check(cls, config):
        wanted = config.scheduler_config.async_scheduling
        shipped(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check)


def features(target, drafters, requests, variants, out, forced_async=False):
    """{variant: {drafter: what ``run`` says, or what it is refused with}}; a drafter may be the empty string.

    ``variants`` gives options by name; ``{drafter}`` in them becomes the drafter's name.
    """
    asked = EngineArgs(model=target, skip_tokenizer_init=True, async_scheduling=True).create_engine_config()
    result = {"async when asked for": asked.scheduler_config.async_scheduling}
    if forced_async:
        keep_async_scheduling()
    for variant, options in variants.items():
        result[variant] = {}
        for name, drafter in drafters.items():
            own = json.loads(json.dumps(options).replace("{drafter}", name))
            try:
                result[variant][name] = run(target, drafter, requests, own)
            except Exception as error:
                result[variant][name] = {"said": f"{type(error).__name__}: {error}"}
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    {f.__name__: f for f in (features,)}[sys.argv[1]](**json.loads(sys.argv[2]))
