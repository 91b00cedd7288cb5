"""Training data through stock vLLM: the target's answers, and its features taken while it answers.

Features come from ordinary forward hooks on the decoder layers of the in-process engine, so that they are exactly what
the drafter is given when served, and cost no second forward. Run as ``python -m vllm_ext.collect --help``.
Resumable: a shard that exists is not made again.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_plugins.train.answers import target_fingerprint
from dflash_plugins.train.prompts import Prompt, finish_opening, training_prompts
from dflash_plugins.train.store import StoredSequence, StoreMeta, has_shard, pack, write_shard

SHARD_SEQUENCES = 256
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


def _engine(target: Path) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    return LLM(
        str(target),
        dtype="bfloat16",
        enforce_eager=True,
        max_num_seqs=SHARD_SEQUENCES,
        max_model_len=1024,
        enable_prefix_caching=False,
        async_scheduling=False,
    )


def _written_prompts(llm: Any, prompts: list[Prompt]) -> Iterator[Prompt]:
    """Completes the openings with the target itself; those of no use are left out."""
    from vllm import SamplingParams

    frame = _chat(llm, "\0").split("\0")[0]
    openings = [p for p in prompts if p.opening]
    params = SamplingParams(temperature=0.9, max_tokens=OPENING_TOKENS, stop=["<|im_end|>"])
    outputs = llm.generate([frame + p.text for p in openings], params, use_tqdm=True)
    done = iter(
        finish_opening(p, o.outputs[0].text) if o.outputs[0].finish_reason == "stop" or p.stub else None
        for p, o in zip(openings, outputs, strict=True)
    )
    for prompt in prompts:
        finished = next(done) if prompt.opening else prompt
        if finished is not None:
            yield finished


def _chat(llm: Any, text: str) -> str:
    rendered: str = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return rendered


def _make_shard(llm: Any, recorder: FeatureRecorder, prompts: list[Prompt], max_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=SAMPLED_TEMPERATURE if i % SAMPLED_EVERY == 0 else 0.0, max_tokens=max_tokens, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate([_chat(llm, p.text) for p in prompts], params, use_tqdm=False)
    hidden = llm.llm_engine.model_config.get_hidden_size()
    return pack([_stored(output, recorder.take(output.request_id), hidden) for output in outputs])


def _stored(output: Any, rows: Any, hidden: int) -> StoredSequence:
    """One answered request; its last token was never fed to the target, so its row is zero."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    found = 0 if rows is None else rows.shape[0]
    if found != len(ids) - 1:
        raise RuntimeError(f"request {output.request_id}: features of {found} rows for {len(ids)} tokens")
    import torch

    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return StoredSequence(ids, len(output.prompt_token_ids), rows[:, :-hidden], rows[:, -hidden:])


def _load_or_write_prompts(llm: Any, path: Path, total: int, seed: int, chatterbot: Path | None) -> list[Prompt]:
    from dflash_plugins.pairs.prompts import is_measuring_prompt

    if not path.exists():
        drawn = training_prompts(total=total, seed=seed, chatterbot=chatterbot)
        prompts = [p for p in _written_prompts(llm, drawn) if not is_measuring_prompt(p.text)]
        partial = path.with_suffix(".partial")
        partial.write_text(
            "".join(json.dumps({"text": p.text, "source": p.source}) + "\n" for p in prompts), encoding="utf-8"
        )
        partial.replace(path)
    return [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main(
    target: Annotated[Path, typer.Option(help="target checkpoint folder")],
    out: Annotated[Path, typer.Option(help="folder of the feature store")],
    layers: Annotated[str, typer.Option(help="target layer ids, comma separated")] = "1,8,15,22,28",
    total: Annotated[int, typer.Option(help="prompts to draw")] = 9000,
    max_tokens: Annotated[int, typer.Option(help="response tokens per prompt")] = 160,
    seed: Annotated[int, typer.Option()] = 1,
    chatterbot: Annotated[Path | None, typer.Option(help="english folder of chatterbot-corpus")] = None,
    shards: Annotated[int | None, typer.Option(help="stop after this many shards")] = None,
) -> None:
    """Writes prompts.jsonl and the shards of a feature store."""
    layer_ids = tuple(int(part) for part in layers.split(","))
    out.mkdir(parents=True, exist_ok=True)
    meta = StoreMeta(target_fingerprint(target), layer_ids)
    llm = _engine(target)
    prompts = _load_or_write_prompts(llm, out / "prompts.jsonl", total, seed, chatterbot)
    core = llm.llm_engine.engine_core.engine_core
    recorder = FeatureRecorder(core.model_executor.driver_worker.worker.model_runner, layer_ids)
    chunks = [prompts[i : i + SHARD_SEQUENCES] for i in range(0, len(prompts), SHARD_SEQUENCES)]
    for number, chunk in enumerate(chunks[:shards]):
        path = out / f"shard-{number:05d}.safetensors"
        if has_shard(path, meta):
            continue
        began = time.perf_counter()
        write_shard(path, _make_shard(llm, recorder, chunk, max_tokens), meta, [p.source for p in chunk])
        rate = len(chunk) * max_tokens / (time.perf_counter() - began)
        typer.echo(f"{path.name} of {len(chunks)}: {rate:.0f} response tokens/s", err=True)
    recorder.close()


if __name__ == "__main__":
    typer.run(main)
