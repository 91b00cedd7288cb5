"""Jobs of one engine feature each, run by conftest.run_job as ``python feature_jobs.py NAME JSON``; all write JSON."""

import json
import sys
from pathlib import Path

from engine_jobs import build, generate, long_requests, metric


class Watcher:
    """Mixed into every worker by ``worker_extension_cls``: notes what each rank's proposer drafts."""

    def watch(self):
        proposer, self.noted = self.model_runner.drafter, []
        shipped = proposer.propose

        def propose(*args, **kwargs):
            ids = shipped(*args, **kwargs)
            self.noted.append(ids.tolist())
            return ids

        proposer.propose = propose

    def noted_drafts(self):
        return self.noted


WATCHER = {"worker_extension_cls": "feature_jobs.Watcher"}


def run(target, drafter, vocab, options, requests=None):
    """What a run generates, what every rank drafts on the way, and the counters of speculation."""
    llm = build(target, drafter, **WATCHER, **options)
    if drafter:
        llm.collective_rpc("watch")
    outputs = generate(llm, requests or long_requests(vocab))
    result = {"ids": [one["ids"] for one in outputs]}
    if drafter:
        result |= {"ranks": llm.collective_rpc("noted_drafts"), "hits": metric(llm, "vllm:prefix_cache_hits")}
        result["accepted"] = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    llm.llm_engine.engine_core.shutdown()
    return result


def works(target, drafters, vocab, options, out):
    """Plain without the feature, then every drafter with it; or what the engine says instead."""
    result = {"plain": run(target, None, vocab, {})["ids"], "with": {}}
    for name, drafter in drafters.items():
        try:
            result["with"][name] = run(target, drafter, vocab, options)
        except Exception as error:
            result["with"][name] = {"said": f"{type(error).__name__}: {error}"}
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    {f.__name__: f for f in (works,)}[sys.argv[1]](**json.loads(sys.argv[2]))
