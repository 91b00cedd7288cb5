"""A feature store from a JSON-lines file of answers, with a transformers target and no engine.

A line holds ``prompt`` and ``response`` (text) or ``prompt_ids`` and ``response_ids`` (token ids), and may name its
``source``. A line that holds a measuring prompt is refused: what is measured on must not be trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_plugins.errors import BadInput
from dflash_plugins.features import FeatureTap
from dflash_plugins.pairs.prompts import is_measuring_prompt
from dflash_plugins.train.store import StoredSequence, StoreMeta, has_shard, pack, write_shard

SEQUENCES_PER_SHARD = 256


@dataclass(frozen=True)
class Answer:
    """Token ids of one prompt and the target's response to it."""

    prompt_ids: list[int]
    response_ids: list[int]
    source: str


def target_fingerprint(target: Path) -> str:
    """``sha256:`` of the target's weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(target.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def read_answers(path: Path, target: Path) -> list[Answer]:
    """All answers of a JSON-lines file; BadInput names the line that is not usable."""
    tokenizer: Any = None
    answers = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: not JSON ({error})") from error
        if "prompt_ids" not in row and tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(target)
        answers.append(_answer(row, tokenizer, f"{path}, line {number}"))
    return answers


def _answer(row: dict[str, Any], tokenizer: Any, where: str) -> Answer:
    source = str(row.get("source", "file"))
    if "prompt_ids" in row and "response_ids" in row:
        return Answer(list(row["prompt_ids"]), list(row["response_ids"]), source)
    if "prompt" not in row or "response" not in row:
        raise BadInput(f"{where}: needs prompt and response, or prompt_ids and response_ids; has {sorted(row)}")
    if is_measuring_prompt(row["prompt"]):
        raise BadInput(f"{where}: is a measuring prompt; training on it would make the measurement worthless")
    messages = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Answer(tokenizer(prompt)["input_ids"], tokenizer(row["response"])["input_ids"], source)


@torch.no_grad()
def build_store(
    answers: Sequence[Answer],
    target: Path,
    target_layer_ids: Sequence[int],
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> None:
    """Computes features of every answer with the transformers target in ``target`` and writes shards to ``out``.

    A shard that exists is kept, so that a run which was stopped goes on where it was.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    meta = StoreMeta(target_fingerprint(target), tuple(target_layer_ids))
    shards = range(0, len(answers), SEQUENCES_PER_SHARD)
    with FeatureTap(model, target_layer_ids) as tap:
        for number, first in enumerate(shards):
            report("features", number, len(shards))
            path = out / f"shard-{number:05d}.safetensors"
            if not has_shard(path, meta):
                chunk = answers[first : first + SEQUENCES_PER_SHARD]
                write_shard(path, _shard(model, tap, chunk), meta, [a.source for a in chunk])
    report("features", len(shards), len(shards))


def _shard(model: Any, tap: FeatureTap, answers: Sequence[Answer]) -> dict[str, Tensor]:
    sequences = []
    for answer in answers:
        ids = [*answer.prompt_ids, *answer.response_ids]
        final = model.get_decoder()(torch.tensor([ids])).last_hidden_state[0]
        sequences.append(StoredSequence(ids, len(answer.prompt_ids), tap.take()[0], final))
    return pack(sequences)
