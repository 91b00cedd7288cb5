"""The prompts we measure with, fixed in the repository, and the guard that keeps them out of training data.

``demo`` holds items 0-2 of HumanEval, MT-bench and GSM8K, ``prove`` the first 20 of each. ``ci/make_prompts.py``
makes both from wheels on the package index, and ``measuring_hashes.json``, which knows ALL items of the three sets, so
that data can be checked without shipping them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_plugins.config_places import json_object
from dflash_plugins.errors import BadInput

EMBEDDED = ("demo", "prove")
NGRAM_WORDS = 8
NGRAM_BYTES = 6  # 48 bits: among ten million n-grams of training text, less than 0.01 false alarms are expected


class Prompt(BaseModel):
    """One user message, as ``prompt`` or as ready token ``ids``; ``set`` names the collection it belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    set: str
    prompt: str | None = Field(default=None, min_length=1)
    ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    source: str = ""
    licence: str = ""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.ids is None):
            raise ValueError("give either 'prompt' or 'ids'")
        return self


def load_prompts(name_or_path: str | Path) -> tuple[Prompt, ...]:
    """An embedded set (``demo``, ``prove``), a JSONL file of ``Prompt`` records, or a text file of one-line prompts.

    ``id`` defaults to the line number, ``set`` to the file's stem. Raises ``BadInput`` naming every unusable line.
    """
    if str(name_or_path) in EMBEDDED:
        return _parse_jsonl(_resource(f"{name_or_path}.jsonl"), origin=str(name_or_path))
    path = Path(name_or_path).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise BadInput(f"prompts {str(path)!r}: {reason}; name a file, or one of {', '.join(EMBEDDED)}") from error
    if path.suffix == ".jsonl":
        return _parse_jsonl(content, origin=path.stem)
    return _not_empty([Prompt(id=n, set=path.stem, prompt=line) for n, line in _lines(content)], path.stem)


def _resource(name: str) -> str:
    return files("dflash_plugins.pairs").joinpath("prompts", name).read_text(encoding="utf-8")


def _lines(content: str) -> list[tuple[str, str]]:
    # split("\n"), not splitlines(): a JSON string may hold U+2028 as it is.
    return [(str(number), line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]


def _not_empty(prompts: list[Prompt], origin: str) -> tuple[Prompt, ...]:
    if not prompts:
        raise BadInput(f"prompts {origin!r}: no prompt in it")
    return tuple(prompts)


def _parse_jsonl(content: str, *, origin: str) -> tuple[Prompt, ...]:
    prompts, faults = [], []
    for number, line in _lines(content):
        try:
            prompts.append(_prompt(line, number, origin))
        except BadInput as fault:
            faults.append(f"  line {number}: {fault}")
    if faults:
        raise BadInput(f"prompts {origin!r} cannot be used:\n" + "\n".join(faults))
    return _not_empty(prompts, origin)


def _prompt(line: str, number: str, origin: str) -> Prompt:
    record = json_object(line)
    try:
        return Prompt.model_validate({"id": number, "set": origin} | record)
    except ValidationError as error:
        reasons = ((".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors())
        raise BadInput("; ".join(f"{key}: {reason}" if key else reason for key, reason in reasons)) from error


def is_measuring_prompt(text: str) -> bool:
    """Whether ``text`` is, contains or quotes a measuring prompt.

    Case, punctuation and white space do not matter. True when all of it equals an item, or when any eight
    words of it in a row occur in one: a false alarm costs one training sample, a miss would make our figures worthless.
    """
    words = normalised_words(text)
    known = _measuring_hashes()
    return text_hash(words) in known[0] or any(gram in known[1] for gram in ngram_hashes(words))


def normalised_words(text: str) -> list[str]:
    """Words in lower case and compatibility form, without punctuation: letters and digits only."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold())


def text_hash(words: list[str]) -> str:
    """SHA-256 in hex of the words joined by single spaces."""
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def ngram_hashes(words: list[str]) -> Iterator[bytes]:
    """Six bytes for every run of eight words; nothing for a shorter text."""
    for start in range(len(words) - NGRAM_WORDS + 1):
        gram = " ".join(words[start : start + NGRAM_WORDS])
        yield hashlib.sha256(gram.encode()).digest()[:NGRAM_BYTES]


@cache
def _measuring_hashes() -> tuple[frozenset[str], frozenset[bytes]]:
    document: dict[str, Any] = json.loads(_resource("measuring_hashes.json"))
    packed = base64.b64decode(document["ngrams"])
    grams = (packed[start : start + NGRAM_BYTES] for start in range(0, len(packed), NGRAM_BYTES))
    return frozenset(document["texts"]), frozenset(grams)
