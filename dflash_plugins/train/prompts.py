"""Training prompts without a hub: what the target writes itself, what people wrote in packages, word problems.

No prompt of a measuring set may enter (:mod:`dflash_plugins.pairs.prompts` guards). Everything follows from one seed.

Sources, each named in the data and in the model card:

``self``        the target completes the user's turn after a short opening (licence: the target's, Apache-2.0)
``stdlib``      signature and docstring of functions of Python's standard library (PSF-2.0)
``chatterbot``  questions of the ``chatterbot-corpus`` package, English part (BSD-3-Clause)
``problems``    word problems from the templates of ``prompt_parts.yaml``

With a folder that ``ci/fetch_sources.py`` made, every source of :mod:`dflash_plugins.train.sources` comes in, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain, islice, zip_longest
from pathlib import Path

import yaml

from dflash_plugins.train.source_readers import as_stub
from dflash_plugins.train.sources import MAX_PROMPT_CHARS, catalogue, distinct, has_prompt_size, read_sources


@dataclass(frozen=True)
class _Parts:
    """What ``prompt_parts.yaml`` holds: word lists as one string each, openings and templates as lists."""

    stdlib_modules: str
    stub_verbs: str
    stub_nouns: str
    names: str
    things: str
    chat_openings: list[str]
    code_openings: list[str]
    stub_heads: list[str]
    problem_openings: list[str]
    problem_templates: list[str]


@cache
def _parts() -> _Parts:
    return _Parts(**yaml.safe_load(files("dflash_plugins.train").joinpath("prompt_parts.yaml").read_text("utf-8")))


@dataclass(frozen=True)
class Prompt:
    """One training prompt. ``opening`` is true when the target has still to complete it."""

    text: str
    source: str
    opening: bool = False
    stub: bool = False


def training_prompts(
    *, total: int, seed: int, chatterbot: Path | None = None, sources: Path | None = None
) -> list[Prompt]:
    """``total`` prompts and openings, shuffled so that any first part is a fair mixture.

    ``sources`` is a folder of ``ci/fetch_sources.py``: then no two prompts are the same words, and each kind of source
    has the share that ``sources.yaml`` gives it, or all that it has. The rest are openings for the target to complete.
    """
    rng = random.Random(seed)  # noqa: S311
    prompts = _mixed(total, rng, chatterbot, sources) if sources else _plain(total, rng, chatterbot)
    prompts += _openings(total - len(prompts), rng)
    rng.shuffle(prompts)
    return prompts


def _plain(total: int, rng: random.Random, chatterbot: Path | None) -> list[Prompt]:
    stdlib = list(_stdlib_stubs())
    corpus = list(_chatterbot_questions(chatterbot))
    rng.shuffle(stdlib)
    rng.shuffle(corpus)
    return stdlib[: total * 16 // 100] + corpus[: total * 12 // 100] + _repeat(_problem, total * 16 // 100, rng)


def _mixed(total: int, rng: random.Random, chatterbot: Path | None, sources: Path) -> list[Prompt]:
    seen: set[str] = set()
    texts = read_sources(sources, seen)
    shares = catalogue().shares
    problems = _repeat(_problem, 2 * (total * shares["problems"] // 100), rng)  # twice: some come out the same
    own = {"stdlib": _stdlib_stubs(), "chatterbot": _chatterbot_questions(chatterbot), "problems": problems}
    texts |= {name: {name: distinct((prompt.text for prompt in prompts), seen)} for name, prompts in own.items()}
    return [
        prompt
        for kind, percent in shares.items()
        for prompt in _evenly(texts.get(kind, {}), total * percent // 100, rng)
    ]


def _evenly(texts: dict[str, list[str]], count: int, rng: random.Random) -> list[Prompt]:
    """``count`` prompts, one of each source in turn, so that a large source does not crowd out the small ones."""
    queues = [[Prompt(text, name) for text in rng.sample(pool, len(pool))] for name, pool in texts.items()]
    turns = chain.from_iterable(zip_longest(*queues))
    return list(islice((prompt for prompt in turns if prompt is not None), count))


def _openings(count: int, rng: random.Random) -> list[Prompt]:
    makers: tuple[Callable[[random.Random], Prompt], ...] = (
        _chat,
        _chat,
        _chat,
        _code,
        _stub,
        _stub,
        _problem_opening,
        _problem_opening,
    )
    return [makers[i % len(makers)](rng) for i in range(count)]


def _repeat(maker: Callable[[random.Random], Prompt], count: int, rng: random.Random) -> list[Prompt]:
    return [maker(rng) for _ in range(count)]


def _chat(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(_parts().chat_openings), "self", opening=True)


def _code(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(_parts().code_openings), "self", opening=True)


def _stub(rng: random.Random) -> Prompt:
    name = f"{rng.choice(_parts().stub_verbs.split())}_{rng.choice(_parts().stub_nouns.split())}"
    return Prompt(f"{rng.choice(_parts().stub_heads)}{name}(", "self", opening=True, stub=True)


def _numbers(rng: random.Random) -> dict[str, str]:
    name, other = rng.sample(_parts().names.split(), 2)
    small = {key: str(rng.randint(2, 40)) for key in "abc"}
    return {
        "name": name,
        "other": other,
        "things": rng.choice(_parts().things.split()),
        "big": str(rng.randint(5, 40) * 12),
        **small,
    }


def _problem(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(_parts().problem_templates).format(**_numbers(rng)), "problems")


def _problem_opening(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(_parts().problem_openings).format(**_numbers(rng)), "self", opening=True)


def _stdlib_stubs() -> Iterator[Prompt]:
    seen = set()
    for function in _stdlib_functions():
        doc = inspect.getdoc(function)
        if not doc or not 40 <= len(doc) <= MAX_PROMPT_CHARS or doc in seen:
            continue
        try:
            signature = str(inspect.signature(function))
        except (TypeError, ValueError):
            continue
        seen.add(doc)
        yield Prompt(as_stub(f"{function.__name__}{signature}", doc), "stdlib")


def _stdlib_functions() -> Iterator[Callable[..., object]]:
    for name in _parts().stdlib_modules.split():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            for _, member in sorted(inspect.getmembers(module), key=lambda item: item[0]):
                yield from _functions_of(member)


def _functions_of(member: object) -> Iterable[Callable[..., object]]:
    if inspect.isfunction(member):
        return [member]
    if inspect.isclass(member) and str(member.__module__).split(".")[0] in _parts().stdlib_modules.split():
        return [m for _, m in inspect.getmembers(member, inspect.isfunction)]
    return []


def _chatterbot_questions(folder: Path | None) -> Iterator[Prompt]:
    folder = folder or _installed_corpus()
    if folder is None:
        return
    seen = set()
    for path in sorted(folder.glob("*.yml")):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        for conversation in document.get("conversations", []):
            question = str(conversation[0]).strip() if conversation else ""
            if 8 <= len(question) <= MAX_PROMPT_CHARS and question not in seen:
                seen.add(question)
                yield Prompt(question, "chatterbot")


def _installed_corpus() -> Path | None:
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "data" / "english"


def finish_opening(prompt: Prompt, completion: str) -> Prompt | None:
    """The user's turn after the target completed ``prompt``; ``None`` when what it wrote is no use as a prompt.

    A function stub ends with its docstring, as the stubs that people send do.
    """
    text = prompt.text + completion
    if prompt.stub:
        parts = text.split('"""')
        if len(parts) < 3:
            return None
        text = '"""'.join(parts[:2]) + '"""\n'
    text = text.strip("\n ") + ("\n" if prompt.stub else "")
    return Prompt(text, prompt.source) if has_prompt_size(text) else None
