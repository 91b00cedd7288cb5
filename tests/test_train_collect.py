"""Answers collected through vLLM without features: the file that can be gone on with, and what is asked for it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_plugins.errors import BadInput
from dflash_plugins.train.answers import Answer, answers_so_far, append_answers
from dflash_plugins.train.prompts import Prompt
from vllm_ext import collect
from vllm_ext.collect import Asking, ready_prompts, user_frame, write_answers

ANSWERS = [Answer([1, 2], [3, 4, 5], "self"), Answer([6], [7], "problems"), Answer([8, 9], [10], "stdlib")]


def test_answers_are_read_back_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "answers.jsonl"
    assert answers_so_far(path) == []
    append_answers(path, ANSWERS[:2])
    append_answers(path, ANSWERS[2:])
    assert answers_so_far(path) == ANSWERS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "source": "self"}


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_line_that_was_cut_is_dropped(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, ANSWERS[:2])
    whole = path.read_bytes()
    append_answers(path, ANSWERS[2:])
    last = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + last[:kept])
    assert answers_so_far(path) == ANSWERS[:2]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("broken", [b"\0\0\0\n", b"{oops\n", b"\n", b"\xc3\n"])
def test_a_last_line_that_is_no_json_is_dropped(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, ANSWERS)
    path.write_bytes(path.read_bytes() + broken)
    assert answers_so_far(path) == ANSWERS
    path.write_bytes(broken)
    assert answers_so_far(path) == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "named"),
    [("{oops", "line 1: not JSON"), ('{"prompt_ids": [1]}', "line 1: response_ids has to be a list")],
)
def test_a_broken_line_before_the_last_is_named_and_left(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    append_answers(path, ANSWERS)
    content = path.read_bytes()
    with pytest.raises(BadInput, match=named):
        answers_so_far(path)
    assert path.read_bytes() == content


class Tokenizer:
    """Characters as ids, <bos> before a text, and a chat template where it is told to have one."""

    def __init__(self, chat_template: str | None = "{}") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<{messages[0]['content']}/>\n"


@dataclass
class Params:
    """What the fake engine is asked with."""

    temperature: float
    max_tokens: int
    ignore_eos: bool = False
    detokenize: bool = True
    stop_token_ids: tuple[int, ...] = ()


class Llm:
    """Answers with the first token of the prompt's text, ``max_tokens`` times; dies at request number ``dies_at``."""

    def __init__(self, tokenizer: Tokenizer | None = None, dies_at: int | None = None) -> None:
        self.tokenizer, self.dies_at = tokenizer or Tokenizer(), dies_at
        self.asked: list[tuple[list[int], Params]] = []

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        outputs = []
        for prompt, one in zip(prompts, each, strict=True):
            if len(self.asked) == self.dies_at:
                raise KeyboardInterrupt
            ids = prompt["prompt_token_ids"]
            self.asked.append((ids, one))
            answer = SimpleNamespace(
                token_ids=[ids[1]] * one.max_tokens, text=" and so on, and on", finish_reason="stop"
            )
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[answer]))
        return outputs


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=Params))


PROMPTS = [Prompt(f"{i:02d} is a number", ("self", "problems")[i % 2]) for i in range(20)]


def expected(prompts: list[Prompt]) -> list[Answer]:
    return [Answer([ord(c) for c in f"<{p.text}/>\n"], [ord(p.text[0])] * 3, p.source) for p in prompts]


def test_a_stopped_collection_goes_on_in_whole_chunks(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write_answers(Asking(Llm(dies_at=15), 3, True), PROMPTS, path, 6)
    assert answers_so_far(path) == expected(PROMPTS[:12])
    path.write_bytes(path.read_bytes()[:-5])
    second = Llm()
    write_answers(Asking(second, 3, True), PROMPTS, path, 6)
    assert answers_so_far(path) == expected(PROMPTS)
    assert len(second.asked) == 9
    before = path.read_bytes()
    write_answers(Asking(third := Llm(), 3, True), PROMPTS, path, 6)
    assert (third.asked, path.read_bytes()) == ([], before)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_every_eighth_prompt_of_all_is_sampled_wherever_a_chunk_begins(tmp_path: Path, ignore_eos: bool) -> None:
    llm = Llm()
    write_answers(Asking(llm, 3, ignore_eos), PROMPTS, tmp_path / "answers.jsonl", 5)
    params = [one for _, one in llm.asked]
    assert [i for i, one in enumerate(params) if one.temperature > 0] == [0, 8, 16]
    assert {one.ignore_eos for one in params} == {ignore_eos}
    assert {one.max_tokens for one in params} == {3}


def test_answers_to_other_prompts_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, expected(PROMPTS))
    for prompts in (PROMPTS[1:], PROMPTS[:4]):
        with pytest.raises(BadInput, match="holds answers to other prompts"):
            write_answers(Asking(Llm(), 3, True), prompts, path, 6)


def never() -> list[Prompt]:
    raise AssertionError("nothing is to be drawn")


def test_given_prompts_are_guarded_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "given.jsonl"
    texts = ["What is a dog?", "Express z-x in y", "long " * 30, "What is a cat?"]
    given.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = collect.read_prompts(given)
    path = tmp_path / "answers.prompts.jsonl"
    ready = ready_prompts(Llm(), path, found, never, 40)
    assert ready == [Prompt(texts[0], "file"), Prompt(texts[3], "file")] == collect.read_prompts(path)
    assert "1 measuring prompts, 1 of more than 40 tokens" in capsys.readouterr().err


def test_given_prompts_may_grow_but_not_change(tmp_path: Path) -> None:
    path = tmp_path / "answers.prompts.jsonl"
    for count in (4, 4, 6):
        assert ready_prompts(Llm(), path, PROMPTS[:count], never, 40) == PROMPTS[:count]
    for given in (PROMPTS[1:], PROMPTS[:5]):
        with pytest.raises(BadInput, match="holds other prompts"):
            ready_prompts(Llm(), path, given, never, 40)


def test_drawn_prompts_are_finished_by_the_target_and_drawn_once(tmp_path: Path) -> None:
    path, llm = tmp_path / "answers.prompts.jsonl", Llm()
    drawn = [Prompt("Why does a dog", "self", opening=True), Prompt("What is a cat?", "problems")]
    ready = ready_prompts(llm, path, None, lambda: drawn, 60)
    assert ready == [Prompt("Why does a dog and so on, and on", "self"), drawn[1]]
    ids, params = llm.asked[0]
    assert ids == [ord(c) for c in "<Why does a dog"]
    assert params.stop_token_ids == [ord("/")]
    assert ready_prompts(llm, path, None, never, 60) == ready
    assert len(llm.asked) == 1


def test_a_target_without_a_chat_template_reads_plain_text(tmp_path: Path) -> None:
    llm = Llm(Tokenizer(None))
    assert user_frame(llm.tokenizer) == ("", "")
    ready_prompts(llm, tmp_path / "p", None, lambda: [Prompt("Why does a dog", "self", opening=True)], 60)
    write_answers(Asking(llm, 3, True), PROMPTS[:1], tmp_path / "a", 6)
    assert [ids[:2] for ids, _ in llm.asked] == [[0, ord("W")], [0, ord("0")]]


@pytest.mark.parametrize("line", ['{"source": "x"}', '{"text": " "}', '{"text": 5}', "[]", "{oops"])
def test_prompts_that_are_none_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "given.jsonl"
    path.write_text('{"text": "Hello"}\n' + line + "\n")
    with pytest.raises(BadInput, match=r"given\.jsonl, line 2"):
        collect.read_prompts(path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "either --out"),
        ({"out": Path("o"), "answers": Path("a")}, "either --out"),
        ({"out": Path("o"), "tensor_parallel_size": 2}, "tensor-parallel-size"),
        ({"answers": Path("a"), "max_tokens": 1024}, "no room for a prompt"),
        ({"answers": Path("a"), "prompts": Path("nowhere")}, "nowhere: cannot be read"),
    ],
)
def test_arguments_that_do_not_fit_start_no_engine(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        collect.main(target=Path("target"), **arguments)
