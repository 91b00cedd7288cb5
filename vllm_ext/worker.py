"""The process in which vLLM runs for the commands of the core: ``python -m vllm_ext.worker CONFIG_JSON``.

The protocol is that of ``dflash_plugins.driver``. vLLM is imported only after its output has been turned away from the
channel that carries the answers.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any

from dflash_plugins.driver import Completion, Counters, EngineConfig, Generated, Hello, Sampling

COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_by_slot",
}


class Channel:
    """Requests in, answers out. When the parent closes its end nobody waits any more, and the process ends at once."""

    def __init__(self) -> None:
        self._answers: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what the engine prints goes to the log
        requests = os.fdopen(os.dup(0), encoding="utf-8")
        with open(os.devnull, encoding="utf-8") as nothing:  # noqa: PTH123 - a file descriptor is wanted
            os.dup2(nothing.fileno(), 0)
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, args=(requests,), daemon=True).start()

    def _listen(self, requests: IO[str]) -> None:
        for line in requests:
            self._requests.put(json.loads(line))
        os._exit(0)  # also in the middle of a batch: an orphan would decode for nobody

    def next(self) -> dict[str, Any]:
        return self._requests.get()

    def send(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


class ProgressSink:
    """Stands where vLLM expects a tqdm bar and passes the count of finished requests on."""

    def __init__(self, send: Callable[[dict[str, Any]], None], total: int) -> None:
        self._send, self.total, self.n = send, total, 0
        self.postfix = ""
        self.format_dict = {"elapsed": 1.0}  # vLLM divides by it for a rate that nobody reads

    def update(self, count: int = 1) -> None:
        self.n += count
        self._send({"progress": [self.n, self.total]})

    def refresh(self) -> None:
        """Nothing to redraw."""

    def close(self) -> None:
        """Nothing to tidy up."""


class Worker:
    """One ``vllm.LLM`` and the two things that the core asks of it."""

    def __init__(self, config: EngineConfig, channel: Channel) -> None:
        from vllm import LLM

        self._channel = channel
        self._llm = LLM(**engine_arguments(config))
        self._tokenizer = None if config.extra.get("skip_tokenizer_init") else self._llm.get_tokenizer()

    def hello(self) -> Hello:
        import vllm

        return Hello(engine="vllm", version=vllm.__version__, flags=flags_in_force(self._llm.llm_engine.vllm_config))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("the target has no tokenizer: give prompts as ids")
        if not getattr(tokenizer, "chat_template", None):
            return [list(tokenizer.encode(text)) for text in texts]
        messages = [[{"role": "user", "content": text}] for text in texts]
        template: Any = tokenizer.apply_chat_template
        rendered = [template(m, tokenize=False, add_generation_prompt=True) for m in messages]
        return [list(tokenizer.encode(text, add_special_tokens=False)) for text in rendered]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generated:
        from vllm import SamplingParams

        params = SamplingParams(
            **sampling.model_dump(exclude={"logits"}),
            logprobs=sampling.logits,
            detokenize=self._tokenizer is not None,
        )
        before = self._counters()
        began = time.perf_counter()
        outputs = self._llm.generate(
            [list(prompt) for prompt in prompts],
            params,
            use_tqdm=self._bar,
        )
        seconds = time.perf_counter() - began
        completions = tuple(completion(output.outputs[0]) for output in outputs)
        return Generated(completions=completions, seconds=seconds, counters=difference(before, self._counters()))

    def _bar(self, iterable: Any = None, *, total: int = 0, **_: Any) -> Any:
        # vLLM wraps the adding of requests in a bar of its own; that takes no time worth telling.
        return ProgressSink(self._channel.send, total) if iterable is None else iterable

    def _counters(self) -> Counters:
        found: dict[str, Any] = {}
        for metric in self._llm.get_metrics():
            if (field := COUNTERS.get(metric.name)) is not None:
                found[field] = getattr(metric, "values", None) or getattr(metric, "value", 0)
        return Counters.model_validate(found)


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``. Logits are asked for raw: a gap is held against a unit in the last place."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": config.target,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "seed": config.seed,
        "disable_log_stats": False,
        "logprobs_mode": "raw_logits",
    }
    if current_platform.is_cpu():
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = 0.9 * config.memory_share
    if config.draft is not None:
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": config.draft,
            "num_speculative_tokens": config.k,
            "draft_sample_method": config.draft_sample_method,
        }
    return arguments | dict(config.extra)


def flags_in_force(vllm_config: Any) -> dict[str, Any]:
    """What decides the computation besides speculation and the random seed, after vLLM's own defaults."""
    import torch

    model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    return {
        "model": str(model.model),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "enforce_eager": model.enforce_eager,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "device": str(vllm_config.device_config.device_type),
        "threads": torch.get_num_threads(),
    }


def completion(sample: Any) -> Completion:
    """One vLLM ``CompletionOutput`` as the core's record."""
    logits = None
    if sample.logprobs is not None:
        rows = [
            sorted(((i, entry.logprob) for i, entry in row.items()), key=lambda p: -p[1]) for row in sample.logprobs
        ]
        logits = tuple(tuple(row) for row in rows)
    return Completion(ids=tuple(sample.token_ids), text=sample.text, finish_reason=sample.finish_reason, logits=logits)


def difference(before: Counters, after: Counters) -> Counters:
    """What one batch added to the engine's running counters."""
    slots = before.accepted_by_slot or (0,) * len(after.accepted_by_slot)
    return Counters(
        rounds=after.rounds - before.rounds,
        proposed=after.proposed - before.proposed,
        accepted=after.accepted - before.accepted,
        accepted_by_slot=tuple(b - a for a, b in zip(slots, after.accepted_by_slot, strict=True)),
    )


def serve(channel: Channel, worker: Worker) -> None:
    """Answer requests until the parent closes the channel."""
    while True:
        request = channel.next()
        try:
            if request["op"] == "encode":
                channel.send({"result": worker.encode(request["texts"])})
            else:
                sampling = Sampling.model_validate(request["sampling"])
                channel.send({"result": worker.generate(request["prompts"], sampling).model_dump(mode="json")})
        except Exception as error:
            traceback.print_exc()
            channel.send({"error": describe(error)})


def describe(error: BaseException) -> str:
    """One line: the innermost reason is what the user can act on."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: " + " ".join(str(error).split())


def main() -> None:
    channel = Channel()
    try:
        worker = Worker(EngineConfig.model_validate_json(sys.argv[1]), channel)
    except Exception as error:
        traceback.print_exc()
        channel.send({"error": describe(error)})
        sys.stdout.flush()
        os._exit(1)
    channel.send({"result": worker.hello().model_dump(mode="json")})
    serve(channel, worker)


if __name__ == "__main__":
    main()
