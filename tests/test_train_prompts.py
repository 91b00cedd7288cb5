"""Training prompts out of packages: what is read of a wheel, what is usable, and how the sources are mixed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

from dflash_plugins.errors import BadInput
from dflash_plugins.pairs.prompts import load_prompts, normalised_words
from dflash_plugins.train import source_readers
from dflash_plugins.train.prompts import training_prompts
from dflash_plugins.train.sources import (
    MAX_PROMPT_CHARS,
    Catalogue,
    Package,
    Source,
    catalogue,
    distinct,
    extract,
    is_usable,
    read_sources,
    write_source,
)

ALLOWED = {"MIT", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "CC0-1.0", "CC-BY-4.0", "CC-BY-SA-3.0"}
COUNTRIES = ("Peru", "Chile", "Ghana", "Kenya", "Japan", "Nepal", "Spain", "Italy")

MODULE = '''
raise SystemExit("this module is never run")


def doubled(n: int) -> int:
    """Twice the number.

    >>> doubled(4)
    8
    """
    return 2 * n


def silent(n):
    """An example without a result.

    >>> silent(4)
    """


def plain(n):
    """No example."""


def _private(n):
    """
    >>> _private(1)
    1
    """


class Holder:
    def method(self):
        """
        >>> Holder().method()
        1
        """
'''
DOUBLED = '''def doubled(n: int) -> int:
    """Twice the number.

    >>> doubled(4)
    8
    """
'''


def _archive(path: Path, files: dict[str, str]) -> ZipFile:
    with ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return ZipFile(path)


def _source(reader: str, **options: object) -> Source:
    return Source.model_validate({"name": "made-up", "kind": "tasks", "reader": reader} | options)


def _jsonl(rows: list[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_stub_is_a_public_function_whose_docstring_shows_a_result(tmp_path: Path) -> None:
    files = {"pack/code.py": MODULE, "pack/tests/code.py": MODULE, "pack/test_code.py": MODULE, "pack/bad.py": "def ("}
    with _archive(tmp_path / "a.whl", files) as archive:
        assert list(source_readers.stubs(archive, _source("stubs"))) == [DOUBLED]


def test_a_long_docstring_keeps_its_first_paragraph_and_its_examples(tmp_path: Path) -> None:
    doc = "Adds.\n\nParameters\n----------\n" + "a word\n" * 200 + "\n    >>> add(1, 2)\n    3\n\nSee also: minus.\n"
    code = "def add(a, b):\n" + "\n".join(f"    {line}" for line in f'"""{doc}"""'.splitlines())
    with _archive(tmp_path / "a.whl", {"pack/code.py": code}) as archive:
        (text,) = source_readers.stubs(archive, _source("stubs"))
    assert text == 'def add(a, b):\n    """Adds.\n\n        >>> add(1, 2)\n        3\n    """\n'


def test_records_fill_the_template_and_incomplete_ones_are_left_out(tmp_path: Path) -> None:
    files = {
        "data/a.jsonl": _jsonl([{"q": "who", "more": {"en": "x"}}, {"other": 1}, "text"]),
        "data/b.json": json.dumps([{"q": "what", "more": {"en": "y"}}]),
        "data/c.json": json.dumps({"1": {"q": "why", "more": {"en": "z"}}}),
    }
    with _archive(tmp_path / "a.whl", files) as archive:
        source = _source("records", files="data/*.jsonl data/*.json", template="{q}? {more[en]}")
        assert list(source_readers.records(archive, source)) == ["who? x", "what? y", "why? z"]


def test_tasks_are_single_questions_spread_over_the_file(tmp_path: Path) -> None:
    def message(role: str, content: str, **more: str) -> dict[str, str]:
        return {"role": role, "content": content} | more

    rows: list[object] = [{"input": [message("system", "Only a letter."), message("user", f"Q{n}")]} for n in range(8)]
    rows += [
        {"input": [message("system", "x", name="example_user"), message("user", "shown an example")]},
        {"input": [message("user", "asks"), message("assistant", "answers"), message("user", "asks again")]},
        {"sample": "no input"},
    ]
    alone = [{"input": [message("system", "Alone.")]}, {"input": "As text."}]
    files = {
        "data/bare/samples.jsonl": _jsonl(rows),
        "data/bare/few_shot.jsonl": _jsonl(rows),
        "data/full/samples.jsonl": _jsonl([*rows[:1], *alone]),
        "data/other/samples.jsonl": _jsonl(rows),
    }
    with _archive(tmp_path / "a.whl", files) as archive:
        source = _source("chat_tasks", folder="data", most_of_each=4, user_only="bare", with_system="full")
        texts = list(source_readers.chat_tasks(archive, source))
    assert texts == ["Q0", "Q2", "Q4", "Q6", "Only a letter.\n\nQ0", "Alone.", "As text."]


@pytest.mark.parametrize(
    ("text", "stands_alone"),
    [
        ("What kind of music do you like?", True),
        ("do you have plans for the weekend?", True),
        ("What did he say about the game?", False),
        ("Why do you say that so often?", False),
        ("How are you?", False),
        ("I like the music of the sixties?", False),
        ("What kind of music do you like", False),
    ],
)
def test_a_chat_question_has_to_say_what_it_is_about(text: str, stands_alone: bool, tmp_path: Path) -> None:
    conversation = {"id": {"messages": [[{"text": "hello"}], [{"text": text}]]}}
    with _archive(tmp_path / "a.whl", {"chats.json": json.dumps(conversation)}) as archive:
        found = list(source_readers.chat_questions(archive, _source("chat_questions", files="chats.json")))
    assert found == ([text] if stands_alone else [])


def test_measuring_prompts_and_what_is_no_prompt_are_not_usable() -> None:
    assert is_usable("Write a poem about the sea.")
    for prompt in load_prompts("prove"):
        assert prompt.prompt is not None
        assert not is_usable(prompt.prompt)
        words = normalised_words(prompt.prompt)
        if 8 <= len(words) < 100:
            assert not is_usable("Please tell me: " + " ".join(words).upper())
    for text in ("Too short", "Unacceptably short", "See https://a.example now", "Привет, как дела?", "Wort " * 200):
        assert not is_usable(text)


def test_texts_of_the_same_words_are_one() -> None:
    seen: set[str] = set()
    assert distinct(["Who wrote Emma?", "who wrote EMMA", "Who read Emma?", "no"], seen) == [
        "Who wrote Emma?",
        "Who read Emma?",
    ]
    assert distinct(["who read emma?"], seen) == []


def test_the_catalogue_names_wheels_exactly_and_allows_this_use() -> None:
    known = catalogue()
    names = [source.name for source in known.sources()]
    assert len(set(names)) == len(names)
    assert sum(known.shares.values()) < 100
    assert {source.kind for source in known.sources()} | {"stdlib", "chatterbot", "problems"} == set(known.shares)
    for package in known.packages:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", package.requirement)
        assert re.fullmatch(r"[0-9a-f]{64}", package.sha256)
        assert package.licence in ALLOWED
        assert {source.data_licence for source in package.sources} <= {None, *ALLOWED}


def _folder(path: Path) -> Path:
    """Sources of invented sentences: two of one kind, a large and a small one, and one of another kind."""
    path.mkdir()
    for name, count in (("sympy", 60), ("toolz", 3), ("nq-open", 60)):
        write_source(path, name, [f"{name} asks question {n} about {COUNTRIES[n % 8]}" for n in range(count)])
    return path


def test_sources_have_their_shares_and_no_prompt_comes_twice(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "sources")
    prompts = training_prompts(total=200, seed=3, sources=folder)
    assert prompts == training_prompts(total=200, seed=3, sources=folder)
    assert prompts != training_prompts(total=200, seed=4, sources=folder)
    counts = Counter(prompt.source for prompt in prompts)
    shares = catalogue().shares
    assert counts["toolz"] == 3
    assert counts["sympy"] == 2 * shares["stubs"] - 3
    assert counts["nq-open"] == 2 * shares["questions"]
    assert counts["problems"] == 2 * shares["problems"]
    assert sum(counts.values()) == 200
    texts = [" ".join(normalised_words(prompt.text)) for prompt in prompts if not prompt.opening]
    assert len(set(texts)) == len(texts)
    assert all(prompt.opening == (prompt.source == "self") for prompt in prompts)
    assert all(len(prompt.text) <= MAX_PROMPT_CHARS for prompt in prompts)


def test_the_first_half_is_the_mixture_of_the_whole(tmp_path: Path) -> None:
    prompts = training_prompts(total=200, seed=3, sources=_folder(tmp_path / "sources"))
    for source, count in Counter(prompt.source for prompt in prompts).items():
        early = sum(prompt.source == source for prompt in prompts[:100])
        # Without replacement the standard deviation is at most sqrt(count) / 2; a source all in one half is far out.
        assert abs(early - count / 2) <= 2 * count**0.5


def test_without_a_folder_nothing_of_the_packages_enters() -> None:
    assert {prompt.source for prompt in training_prompts(total=100, seed=1)} <= {
        "self",
        "stdlib",
        "chatterbot",
        "problems",
    }


@pytest.mark.parametrize("content", ['{"other": 1}\n', "[1]\n", "{\n"])
def test_a_folder_of_no_sources_and_a_broken_source_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match="no source in it"):
        read_sources(tmp_path, set())
    (tmp_path / "toolz.jsonl").write_text(content)
    with pytest.raises(BadInput, match=r"toolz\.jsonl"):
        read_sources(tmp_path, set())


@pytest.fixture(name="fetch_sources")
def _fetch_sources() -> ModuleType:
    path = Path(__file__).parent.parent / "ci" / "fetch_sources.py"
    spec = importlib.util.spec_from_file_location("fetch_sources", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_writes_each_source_of_the_wheels_with_the_right_checksums(
    tmp_path: Path, fetch_sources: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "made_up-1.0-py3-none-any.whl"
    _archive(wheel, {"pack/code.py": MODULE}).close()
    package = Package(
        requirement="made-up==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        licence="MIT",
        sources=(_source("stubs", name="toolz", kind="stubs"),),
    )
    monkeypatch.setattr(fetch_sources, "catalogue", lambda: Catalogue(shares={"stubs": 10}, packages=(package,)))
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["fetch_sources.py", str(out), "--wheels", str(tmp_path)])
    assert fetch_sources.main() == 0
    assert read_sources(out, set()) == {"stubs": {"toolz": [DOUBLED]}}
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(SystemExit, match=r"expected checksum.*made-up==1\.0"):
        fetch_sources.main()


def test_extract_keeps_usable_texts_only(tmp_path: Path) -> None:
    measured = load_prompts("demo")[0].prompt
    texts = (measured, "Name three rivers of Peru.", "name three rivers of Peru", "")
    rows: list[object] = [{"q": text} for text in texts]
    package = Package(
        requirement="made-up==1.0",
        sha256="0" * 64,
        licence="MIT",
        sources=(_source("records", files="a.jsonl", template="{q}"),),
    )
    with _archive(tmp_path / "a.whl", {"a.jsonl": _jsonl(rows)}) as archive:
        assert extract(package, archive) == {"made-up": ["Name three rivers of Peru."]}
