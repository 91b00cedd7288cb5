"""The process in which SGLang runs for the commands of the core: ``python -m sglang_ext.worker CONFIG_JSON``.

SGLang starts processes of its own, which import this module again: nothing happens at its import. It is imported only
after its output has been turned away from the channel that carries the answers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_plugins.driver import Completion, Counters, EngineConfig, Generated, Hello, Sampling
from dflash_plugins.engines import engine_facts
from dflash_plugins.worker import Channel, encode_messages, run

Logits = tuple[tuple[tuple[int, float], ...], ...]
"""Best (id, raw logit) pairs, best first, of every position."""

# On a CPU the cache holds at most so many tokens; requests beyond wait in the engine's queue.
CPU_POOL_TOKENS = 32768
# Logits are put together from a hidden state and rows of the head. The engine rounds them to its dtype, in bfloat16 by
# at most 1/4 up to 64; a head of another form is further off, or not by the same for every token.
HEAD_TOLERANCE = 0.5


class Worker:
    """One ``sglang.Engine`` and the things that the core asks of it."""

    def __init__(self, config: EngineConfig, channel: Channel) -> None:
        on_cpu = prepare_environment()
        import sglang

        self._channel, self._config = channel, config
        self._engine = sglang.Engine(**engine_arguments(config, on_cpu=on_cpu))
        self._tokenizer = self._engine.tokenizer_manager.tokenizer

    def hello(self) -> Hello:
        import sglang

        return Hello(engine="sglang", version=sglang.__version__, flags=flags_in_force(self._engine))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_messages(self._tokenizer, texts)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generated:
        if sampling.rounds:
            raise ValueError("what every round of a request emitted cannot be had from SGLang")
        if sampling.logits is not None and self._config.draft is not None:
            raise ValueError("raw logits are had from SGLang without a drafter only")
        began = time.perf_counter()
        parameters = sampling_parameters(sampling)
        outputs = self._ask(prompts, lambda done, total: self._channel.send({"progress": [done, total]}), parameters)
        seconds = time.perf_counter() - began
        logits: list[Logits | None] = [None] * len(outputs)
        if sampling.logits is not None:
            logits = [self._logits(p, o["output_ids"], sampling.logits) for p, o in zip(prompts, outputs, strict=True)]
        completions = tuple(completion(output, rows) for output, rows in zip(outputs, logits, strict=True))
        counters = sum((counters_of(output["meta_info"], self._config.k) for output in outputs), Counters())
        return Generated(completions=completions, seconds=seconds, counters=counters)

    def _logits(self, prompt: Sequence[int], ids: Sequence[int], count: int) -> Logits:
        """The ``count`` best raw logits at every position of a continuation, each prefix scored by itself."""
        prefixes = [[*prompt, *ids[:position]] for position in range(len(ids))]
        what = {"return_logprob": True, "top_logprobs_num": count, "return_hidden_states": "last"}
        parameters = sampling_parameters(Sampling(max_tokens=1, ignore_eos=True))
        metas = [output["meta_info"] for output in self._ask(prefixes, _silent, parameters, **what)]
        head = Head(Path(self._config.target))
        best = [[(i, value) for value, i, _ in meta["output_top_logprobs"][0]] for meta in metas]
        return tuple(head.logits(row, meta["hidden_states"]) for row, meta in zip(best, metas, strict=True))

    def _ask(
        self,
        prompts: Sequence[Sequence[int]],
        progress: Callable[[int, int], None],
        parameters: Mapping[str, Any],
        **what: Any,
    ) -> list[dict[str, Any]]:
        """The engine's answers to all prompts; raises the first reason after all have been answered."""
        done = 0

        async def one(prompt: Sequence[int]) -> dict[str, Any]:
            nonlocal done
            asked = self._engine.async_generate(input_ids=list(prompt), sampling_params=dict(parameters), **what)
            output: dict[str, Any] = await asked
            reason = output["meta_info"]["finish_reason"]
            if reason["type"] == "abort":
                raise ValueError(f"the engine ended a request: {reason.get('message')}")
            done += 1
            progress(done, len(prompts))
            return output

        async def every() -> list[dict[str, Any] | BaseException]:
            return await asyncio.gather(*(one(prompt) for prompt in prompts), return_exceptions=True)

        outputs = self._engine.loop.run_until_complete(every())
        for output in outputs:
            if isinstance(output, BaseException):
                raise output
        return outputs


def _silent(done: int, total: int) -> None:
    """No progress is wanted."""


def completion(output: Mapping[str, Any], logits: Logits | None) -> Completion:
    """One answer of SGLang as the core's record; without a tokenizer it has no text."""
    return Completion(
        ids=tuple(output["output_ids"]),
        text=output.get("text"),
        finish_reason=output["meta_info"]["finish_reason"]["type"],
        logits=logits,
    )


class Head:
    """Rows of the target's head, read from its files: SGLang gives log probabilities, and a bound needs logits."""

    def __init__(self, target: Path) -> None:
        from dflash_plugins.checkpoint import tensor_files

        files = tensor_files(target)
        names = [name for name in files if name == "lm_head.weight"] or [
            name for name in files if name.endswith("embed_tokens.weight")
        ]
        if len(names) != 1:
            raise ValueError(f"{target}: neither lm_head.weight nor one embed_tokens.weight, logits cannot be had")
        self._name, self._file = names[0], files[names[0]]

    def logits(self, best: Sequence[tuple[int, float]], hidden: Sequence[float]) -> tuple[tuple[int, float], ...]:
        """(id, raw logit), best first, of (id, log probability) after final-norm ``hidden`` [H].

        A log probability is a logit less one number for the whole row. That number is found by multiplying rows of the
        head; ValueError where it is not the same for all of them.
        """
        import torch
        from safetensors import safe_open

        with safe_open(self._file, "pt") as tensors:
            stored = tensors.get_slice(self._name)
            rows = torch.cat([stored[i : i + 1] for i, _ in best]).double()
        given = torch.tensor([value for _, value in best], dtype=torch.float64)
        offsets = rows @ torch.tensor(hidden, dtype=torch.float64) - given
        offset = float(offsets.median())
        if float((offsets - offset).abs().max()) > HEAD_TOLERANCE:
            raise ValueError("the target's logits are not its head times its last hidden state: they cannot be had")
        ordered = sorted(best, key=lambda pair: -pair[1])
        return tuple((i, value + offset) for i, value in ordered)


def prepare_environment() -> bool:
    """Whether there is no accelerator; tells SGLang so, before its import. What the user has set wins."""
    import torch

    if torch.accelerator.is_available():
        return False
    for name, value in engine_facts("sglang").variables["cpu"].items():
        os.environ.setdefault(name, value)
    return True


def engine_arguments(config: EngineConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``. A plain engine can give its last hidden state, for logits."""
    arguments: dict[str, Any] = {
        "model_path": config.target,
        "dtype": config.dtype,
        "max_running_requests": config.max_num_seqs,
        "context_length": config.max_model_len,
        "random_seed": config.seed,
        "log_level": "warning",
        # Several engines are alive at once and take turns: one that waits must not spin.
        "sleep_on_idle": True,
    }
    if on_cpu:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "grammar_backend": "none",
            "max_total_tokens": min(config.max_num_seqs * config.max_model_len, CPU_POOL_TOKENS),
            # Only a limit here: memory is taken as tokens come.
            "mem_fraction_static": 0.5,
        }
    else:
        arguments["mem_fraction_static"] = 0.85 * config.memory_share
    if config.draft is None:
        arguments["return_hidden_states_mode"] = "last"
    else:
        assert config.k is not None
        arguments |= {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": config.draft,
            "speculative_num_draft_tokens": config.k + 1,
        }
    return arguments | dict(config.extra)


def flags_in_force(engine: Any) -> dict[str, Any]:
    """What decides the computation besides speculation and the random seed, after SGLang's own defaults."""
    import torch

    info = engine.get_server_info()
    names = (
        "dtype", "quantization", "disable_cuda_graph", "disable_radix_cache", "kv_cache_dtype", "page_size",
        "max_running_requests", "chunked_prefill_size", "tp_size", "device", "attention_backend", "sampling_backend",
    )  # fmt: skip
    manager = engine.tokenizer_manager
    return {
        "model": str(info["model_path"]),
        **{name: info.get(name) for name in names},
        "max_model_len": int(manager.context_len),
        "threads": torch.get_num_threads(),
    }


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """The core's record under SGLang's names; ValueError for a seed, which this engine takes for all requests alike."""
    if sampling.seed is not None:
        raise ValueError("SGLang draws by the engine's seed: give that one")
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
    }


def counters_of(meta: Mapping[str, Any], k: int | None) -> Counters:
    """What one request's ``meta_info`` says of its rounds; without a round SGLang says nothing of them.

    Entry i of the engine's histogram counts the rounds that accepted exactly i proposals, without entries beyond the
    largest seen.
    """
    if k is None or "spec_verify_ct" not in meta:
        return Counters()
    exactly = list(meta["spec_correct_drafts_histogram"]) + [0] * (k + 1)
    return Counters(
        rounds=meta["spec_verify_ct"],
        proposed=meta["spec_num_proposed_drafts"],
        accepted=meta["spec_num_correct_drafts"],
        accepted_by_slot=tuple(sum(exactly[slot + 1 :]) for slot in range(k)),
    )


if __name__ == "__main__":
    run(Worker)
