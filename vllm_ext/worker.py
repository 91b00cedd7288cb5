"""The process in which vLLM runs for the commands of the core: ``python -m vllm_ext.worker CONFIG_JSON``.

vLLM is imported only after its output has been turned away from the channel that carries the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash_plugins.driver import Completion, Counters, EngineConfig, Generated, Hello, Sampling
from dflash_plugins.worker import Channel, difference, encode_messages, run
from vllm_ext.stopwatch import Stopwatch, runner_of

COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_by_slot",
}


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
        from vllm.platforms import current_platform

        self._channel = channel
        self._llm = LLM(**engine_arguments(config))
        self._on_cpu = current_platform.is_cpu()
        self._tokenizer = None if config.extra.get("skip_tokenizer_init") else self._llm.get_tokenizer()

    def hello(self) -> Hello:
        import vllm

        return Hello(engine="vllm", version=vllm.__version__, flags=flags_in_force(self._llm.llm_engine.vllm_config))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_messages(self._tokenizer, texts)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generated:
        from vllm import SamplingParams

        params = SamplingParams(
            **sampling.model_dump(exclude={"logits", "rounds", "times"}),
            logprobs=sampling.logits,
            detokenize=self._tokenizer is not None,
        )
        before = self._counters()
        parts: list[tuple[float, float]] | None = None
        watched = runner_of(self._llm, on_cpu=self._on_cpu) if sampling.times else None
        began = time.perf_counter()
        if watched is not None:
            parts = []
            with (watch := Stopwatch()).on(watched):
                completions = self._round_by_round(prompts, params, watch, parts)
        elif sampling.rounds or sampling.times:
            completions = self._round_by_round(prompts, params)
        else:
            outputs = self._llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=self._bar)
            completions = tuple(completion(output.outputs[0]) for output in outputs)
        seconds = time.perf_counter() - began
        return Generated(
            completions=completions,
            seconds=seconds,
            counters=difference(before, self._counters()),
            parts=None if parts is None else tuple(parts),
        )

    def _round_by_round(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        watch: Stopwatch | None = None,
        parts: list[tuple[float, float]] | None = None,
    ) -> tuple[Completion, ...]:
        """As ``LLM.generate``, but step by step: what a request gains in a step is what its round emitted.

        ``parts`` takes what ``watch`` saw of every step in which no request was at its prompt.
        """
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.DELTA
        engine = self._llm.llm_engine
        pieces: list[list[Any]] = [[] for _ in prompts]
        arrivals: list[list[float]] = [[] for _ in prompts]
        began = time.monotonic_ns()
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{began}-{number}", TokensPrompt(prompt_token_ids=list(prompt)), params)
        done = 0
        while engine.has_unfinished_requests():
            if watch is not None:
                watch.restart()
            outputs = engine.step()
            seconds = (time.monotonic_ns() - began) / 1e9
            if watch is not None and parts is not None and all(pieces) and watch.draft:
                parts.append((watch.draft, watch.verify))
            for output in outputs:
                number = int(output.request_id.rpartition("-")[2])
                pieces[number].append(output.outputs[0])
                arrivals[number].append(seconds)
                done += output.finished
            self._channel.send({"progress": [done, len(prompts)]})
        return tuple(joined(parts, times) for parts, times in zip(pieces, arrivals, strict=True))

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


def joined(pieces: Sequence[Any], arrivals: Sequence[float]) -> Completion:
    """What a request gained step by step as one record; a step in which it gained nothing was none of its rounds."""
    gained = [piece for piece in pieces if piece.token_ids]
    times = tuple(seconds for piece, seconds in zip(pieces, arrivals, strict=True) if piece.token_ids)
    return Completion(
        ids=tuple(token for piece in gained for token in piece.token_ids),
        text="".join(piece.text for piece in pieces),
        finish_reason=pieces[-1].finish_reason,
        emitted=tuple(len(piece.token_ids) for piece in gained[1:]),
        arrivals=times,
    )


if __name__ == "__main__":
    run(Worker)
