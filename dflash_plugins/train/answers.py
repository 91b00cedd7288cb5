"""Answers of a target in a JSON-lines file, and a feature store made from them with transformers and no engine.

A line holds ``prompt`` and ``response`` (text) or ``prompt_ids`` and ``response_ids`` (token ids), and may name its
``source``. A line that holds a measuring prompt is refused: what is measured on must not be trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_plugins.config_places import json_object
from dflash_plugins.errors import BadInput
from dflash_plugins.features import FeatureTap
from dflash_plugins.pairs.prompts import is_measuring_prompt
from dflash_plugins.train.store import (
    SEQUENCES_PER_SHARD,
    StoredSequence,
    StoreMeta,
    has_shard,
    pack,
    shard_path,
    write_shard,
)
from dflash_plugins.worker import encode_messages

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_ID_LIMIT = 2**31


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


def target_tokenizer(target: Path) -> Any:
    """The transformers tokenizer in the folder ``target``, or None when there is none in it."""
    if not any((target / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def read_answers(path: Path, target: Path) -> list[Answer]:
    """All answers of a JSON-lines file, one of each line; BadInput names the line that is not usable.

    Ready ids are decoded for the guard where ``target`` has a tokenizer; where it has none they are taken as they are.
    """
    tokenizer = target_tokenizer(target)
    return [_answer(row, tokenizer, where) for where, row in json_lines(path)]


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where it stands (for messages) and the object of each line; BadInput for a file or a line that cannot be read."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from error
    # split("\n"), not splitlines(): a JSON string may hold U+2028 as it is.
    for number, line in enumerate(content.removesuffix("\n").split("\n") if content else (), 1):
        where = f"{path}, line {number}"
        try:
            yield where, json_object(line)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from error


def _answer(row: dict[str, Any], tokenizer: Any, where: str) -> Answer:
    if "prompt_ids" in row and "response_ids" in row:
        answer = _answer_of_ids(row, where)
        measured = tokenizer is not None and holds_measuring_prompt(answer.prompt_ids, tokenizer)
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        if tokenizer is None:
            raise BadInput(f"{where}: is text, and the target has no tokenizer; give prompt_ids and response_ids")
        response_ids = list(tokenizer.encode(row["response"], add_special_tokens=False))
        answer = Answer(encode_messages(tokenizer, [row["prompt"]])[0], response_ids, _source(row))
        measured = is_measuring_prompt(row["prompt"])
    else:
        raise BadInput(f"{where}: needs prompt and response, or prompt_ids and response_ids; has {sorted(row)}")
    if measured:
        raise BadInput(f"{where}: is a measuring prompt; training on it would make the measurement worthless")
    if not answer.response_ids:
        raise BadInput(f"{where}: the response is empty")
    return answer


def _answer_of_ids(row: dict[str, Any], where: str) -> Answer:
    for key in ("prompt_ids", "response_ids"):
        ids = row.get(key)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < _ID_LIMIT for i in ids):
            raise BadInput(f"{where}: {key} has to be a list of token ids")
    return Answer(row["prompt_ids"], row["response_ids"], _source(row))


def _source(row: dict[str, Any]) -> str:
    return str(row.get("source", "file"))


def holds_measuring_prompt(ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether a prompt of token ids holds a measuring prompt, anywhere in its text or as one turn of a chat.

    A turn is what stands between two special tokens, with or without its first line, where chat formats put the role:
    so an item that is shorter than the guard's eight words is found where it is a turn of its own, and only there.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    turns = [tokenizer.decode(list(run)) for between, run in groupby(ids, special.__contains__) if not between]
    texts = [tokenizer.decode(list(ids)), *turns, *(turn.partition("\n")[2] for turn in turns)]
    return any(is_measuring_prompt(text) for text in texts)


def append_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Adds one line per answer, on the disk when this returns; BadInput where that fails."""
    lines = "".join(json.dumps(asdict(answer)) + "\n" for answer in answers)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error}); the same command goes on after its last line") from error


def answers_so_far(path: Path) -> list[Answer]:
    """What ``append_answers`` has written to ``path``; BadInput names a line that is no answer.

    A broken last line, which a kill or a full disk leaves, is cut off the file first.
    """
    if not path.exists():
        return []
    _cut_broken_end(path)
    return [_answer_of_ids(row, where) for where, row in json_lines(path)]


def _cut_broken_end(path: Path) -> None:
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    try:
        json.loads(last)
    except ValueError:
        whole = whole.removesuffix(last)
    if whole != content:
        os.truncate(path, len(whole))


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
            path = shard_path(out, number)
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
