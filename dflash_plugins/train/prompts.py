"""Training prompts without a hub: what the target writes itself, Python's own docstrings, a chat corpus, word problems.

No prompt of a measuring set may enter (:mod:`dflash_plugins.pairs.prompts` guards). Everything follows from one seed.

Sources, each named in the data and in the model card:

``self``        the target completes the user's turn after a short opening (licence: the target's, Apache-2.0)
``stdlib``      signature and docstring of functions of Python's standard library (PSF-2.0)
``chatterbot``  questions of the ``chatterbot-corpus`` package, English part (BSD-3-Clause)
``problems``    word problems from the templates in this file
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

STDLIB_MODULES = (
    "argparse ast base64 bisect calendar codecs collections colorsys configparser contextlib copy csv datetime decimal "
    "difflib dis email.utils enum fileinput fnmatch fractions ftplib functools getopt getpass gettext glob graphlib gzip "
    "hashlib heapq hmac html http.client http.cookies imaplib inspect io ipaddress itertools json keyword linecache locale "
    "logging lzma mailbox math mimetypes netrc ntpath numbers operator os pathlib pdb pickletools pkgutil platform plistlib "
    "poplib posixpath pprint profile pstats queue quopri random re reprlib sched secrets shelve shlex shutil signal "
    "smtplib socket socketserver sqlite3 ssl stat statistics string stringprep subprocess symtable sysconfig tabnanny "
    "tarfile tempfile textwrap threading timeit token tokenize trace traceback types typing unittest unittest.mock urllib.parse "
    "urllib.request uuid warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipfile zoneinfo"
).split()

CHAT_OPENINGS = (
    "",
    "",
    "",
    "",
    "Write a",
    "Write an",
    "Compose",
    "Draft",
    "Imagine you are",
    "Pretend to be",
    "Please",
    "Explain",
    "What is",
    "What are",
    "How does",
    "How do",
    "How can I",
    "Describe",
    "Discuss",
    "Compare",
    "Why",
    "Who",
    "When",
    "In the",
    "Given",
    "Suppose",
    "Can you",
    "Could you",
    "I'm",
    "I need",
    "My",
    "Tell me",
    "Summarize",
    "Provide",
    "Identify",
    "List",
    "Create",
    "Help me",
    "The",
    "Analyze",
    "Evaluate",
    "Design",
    "Outline",
    "Consider",
    "You are",
    "Act as",
    "Rewrite",
    "Edit",
    "Extract",
    "Which",
    "Is it",
    "Do you",
    "Share",
    "Give me",
    "Suggest",
)
CODE_OPENINGS = (
    "Write a Python function",
    "Write a function",
    "Implement",
    "Develop a Python program",
    "Write a C++ program",
    "How do I write",
    "Write an HTML",
    "Create a Python script",
    "Given an array",
    "Given a list of",
    "Given a string",
    "Fix the following code:",
    "What does this code do?",
    "Write a SQL query",
)
STUB_HEADS = ("def ", "from typing import List\n\n\ndef ", "\n\ndef ", "import math\n\n\ndef ", "def ")
STUB_VERBS = (
    "count is find get remove filter sum max min sort reverse rotate split join check encode decode make add "
    "compare closest longest shortest largest smallest unique even odd prime common move replace sequence match "
    "convert next total digit merge parse select string list solve valid will any all double"
).split()
STUB_NOUNS = (
    "numbers list string words vowels digits chars integers elements pairs sequence array matrix grid dict keys values "
    "primes factors triangle sum product average median fruits brackets parentheses palindrome sublist substring date "
    "text letters upper lower case binary hex squares cubes range intervals"
).split()
NAMES = (
    "Anna Ben Carla David Emma Farid Grace Hugo Iris Jonas Kira Liam Maria Noah Olga Pedro Quinn Rosa Samir Tara Umar "
    "Vera Will Xena Yusuf Zoe Tom Lily Jack Mia James Sarah Mark Julia"
).split()
THINGS = (
    "apples books marbles stickers pencils cookies eggs stamps cards balloons flowers oranges shirts cups boxes tickets "
    "coins candies bottles chairs"
).split()
PROBLEM_OPENINGS = (
    "{name} has {a} {things}.",
    "{name} bought {a} {things}",
    "{name} earns ${a}",
    "{name} is {a} years old.",
    "A store sells {things}",
    "There are {a} {things}",
    "{name} and {other}",
    "A farmer has {a}",
    "{name} reads {a} pages",
    "{name} runs {a} miles",
    "A train travels {a} miles",
    "{name} wants to buy {a} {things}",
    "In a class of {a} students,",
    "{name}'s car",
    "Every day, {name}",
    "{name} makes {a} {things}",
    "If {a}",
    "A box of {things} costs ${a}.",
)
PROBLEM_TEMPLATES = (
    "{name} has {a} {things}. {other} gives {name} {b} more, and then {name} gives away {c}. How many {things} does {name} have now?",
    "A box holds {a} {things}. {name} buys {b} boxes and uses {c} {things}. How many {things} are left?",
    "{name} earns ${a} an hour and works {b} hours a day. How much does {name} earn in {c} days?",
    "A shop sells {things} at ${a} each. {name} buys {b} of them and pays with a ${big} bill. How much change does {name} get?",
    "{name} reads {a} pages on Monday, twice as many on Tuesday, and {b} pages on Wednesday. How many pages did {name} read in total?",
    "{name} is {a} years older than {other}. In {b} years the sum of their ages will be {big}. How old is {other} now?",
    "A train travels {a} miles in {b} hours. At the same speed, how far does it travel in {c} hours?",
    "{name} has {big} {things}. {name} gives half of them to {other} and then loses {b}. How many {things} remain?",
    "There are {a} rows of {b} chairs in a hall. If {c} chairs are broken, how many people can sit down?",
    "{name} bakes {big} cookies and packs them in bags of {b}. Each bag is sold for ${c}. How much money does {name} make?",
    "{things} cost ${a} per dozen. {name} needs {b} dozen and has a coupon for ${c} off. What does {name} pay?",
    "{name} saves ${a} every week. After {b} weeks {name} spends ${c}. How much is left?",
    "A tank holds {big} liters. It is filled at {a} liters per minute and leaks {c} liters per minute. How long does it take to fill it?",
    "{name}, {other} and a friend share {big} {things} equally after setting {b} aside. How many does each of them get?",
    "{name} walks {a} minutes to school and {b} minutes back, {c} days a week. How many minutes does {name} walk in a week?",
    "A farmer collects {a} eggs a day and sells them at ${b} per dozen. How much does the farmer make in {c} weeks?",
)
MAX_PROMPT_CHARS = 900


@dataclass(frozen=True)
class Prompt:
    """One training prompt. ``opening`` is true when the target has still to complete it."""

    text: str
    source: str
    opening: bool = False
    stub: bool = False


def training_prompts(*, total: int, seed: int, chatterbot: Path | None = None) -> list[Prompt]:
    """``total`` prompts and openings, shuffled so that any first part is a fair mixture."""
    rng = random.Random(seed)  # noqa: S311
    stdlib = list(_stdlib_stubs())
    corpus = list(_chatterbot_questions(chatterbot))
    rng.shuffle(stdlib)
    rng.shuffle(corpus)
    parts = [stdlib[: total * 16 // 100], corpus[: total * 12 // 100], _repeat(_problem, total * 16 // 100, rng)]
    rest = total - sum(map(len, parts))
    makers: tuple[Callable[[random.Random], Prompt], ...] = (_chat, _chat, _chat, _code, _stub, _stub, _problem_opening, _problem_opening)
    parts.append([makers[i % len(makers)](rng) for i in range(rest)])
    prompts = [prompt for part in parts for prompt in part]
    rng.shuffle(prompts)
    return prompts


def _repeat(maker: Callable[[random.Random], Prompt], count: int, rng: random.Random) -> list[Prompt]:
    return [maker(rng) for _ in range(count)]


def _chat(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(CHAT_OPENINGS), "self", opening=True)


def _code(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(CODE_OPENINGS), "self", opening=True)


def _stub(rng: random.Random) -> Prompt:
    name = f"{rng.choice(STUB_VERBS)}_{rng.choice(STUB_NOUNS)}"
    return Prompt(f"{rng.choice(STUB_HEADS)}{name}(", "self", opening=True, stub=True)


def _numbers(rng: random.Random) -> dict[str, str]:
    name, other = rng.sample(NAMES, 2)
    small = {key: str(rng.randint(2, 40)) for key in "abc"}
    return {"name": name, "other": other, "things": rng.choice(THINGS), "big": str(rng.randint(5, 40) * 12), **small}


def _problem(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(PROBLEM_TEMPLATES).format(**_numbers(rng)), "problems")


def _problem_opening(rng: random.Random) -> Prompt:
    return Prompt(rng.choice(PROBLEM_OPENINGS).format(**_numbers(rng)), "self", opening=True)


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
        body = "\n".join(f"    {line}".rstrip() for line in doc.splitlines())
        yield Prompt(f'def {function.__name__}{signature}:\n    """{body.strip()}\n    """\n', "stdlib")


def _stdlib_functions() -> Iterator[Callable[..., object]]:
    for name in STDLIB_MODULES:
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
    if inspect.isclass(member) and str(member.__module__).split(".")[0] in STDLIB_MODULES:
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
    letters = sum(character.isascii() for character in text)
    if not 12 <= len(text) <= MAX_PROMPT_CHARS or letters < 0.97 * len(text):
        return None
    return Prompt(text, prompt.source)
