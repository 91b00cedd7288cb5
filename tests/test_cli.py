"""The console script: fast help without torch, one JSON document, exit codes, and no traceback for bad input."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from dflash_plugins import cli
from dflash_plugins.errors import Refused
from dflash_plugins.findings import Finding, Severity

WITHIN = ("models list", "models fetch", "matrix show", "matrix run", "matrix render")
COMMANDS = ("models", "check", "demo", "prove", "serve", "convert", "train", "matrix")


def test_help_takes_less_than_a_second_and_loads_no_torch(python):
    script = """
import sys, time
started = time.process_time()
from dflash_plugins.cli import main
code = main(["--help"])
heavy = {"torch", "vllm", "sglang", "transformers", "numpy"}
print(code, time.process_time() - started, sorted(heavy & set(sys.modules)))
"""
    result = python("-c", script)
    *shown, last = result.stdout.strip().splitlines()
    code, seconds, loaded = last.split(" ", 2)
    assert (code, loaded) == ("0", "[]"), result.stderr
    assert float(seconds) < 1  # of the processor: the wall clock of a busy machine says nothing about the script
    assert all(any(line.split()[:1] == [command] for line in shown) for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *WITHIN])
def test_every_command_has_help_without_torch(python, command):
    script = "import sys; from dflash_plugins.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    result = python("-c", script, *command.split(), "--help")
    assert result.stdout.strip().splitlines()[-1] == "0 False"
    assert "Usage: dflash-plugins " + command in result.stdout


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_PLUGINS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_list_is_one_document(capsys, empty_cache):
    assert cli.main(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["smollm2-135m"]["status"] == "not fetched"
    assert rows["smollm2-135m"]["path"] is None
    assert rows["smollm2-135m-dflash"]["method"] == "dflash"


def test_list_for_people(capsys, empty_cache):
    assert cli.main(["models", "list"]) == 0
    assert "models fetch smollm2-135m" in capsys.readouterr().out


def test_fetch_prints_the_path_and_keeps_stdout_clean(capsys, monkeypatch, tmp_path):
    def fetch_model(name, *, to, report):
        print("a library that talks")
        report("stage", 1, 2)
        return to

    monkeypatch.setattr("dflash_plugins.pairs.fetch_model", fetch_model)
    arguments = ["models", "fetch", "smollm2-135m", "--to", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert cli.main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"name": "smollm2-135m", "path": str(tmp_path)}
    assert "a library that talks" in shown.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["models", "fetch", "nope"], "unknown embedded model 'nope'"),
        (["models", "fetch"], "NAME"),
        (["bogus"], "bogus"),
        (["models", "list", "--bogus"], "--bogus"),
        (["demo", "--engine", "nope"], "'nope'"),
        (["demo", "--k", "0"], "--k"),
        (["prove", "--engine", "nope", "--target", "x", "--draft", "y"], "'nope'"),
        (["prove", "--engine", "nope", "--target", "x", "--draft", "y", "--set", "a"], "KEY=VALUE"),
        (["prove"], "--engine"),
        (["check", "--engine", "nope", "--target", ".", "--draft", "."], "'nope'"),
        (["check", "--engine", "vllm"], "--target"),
        (["train", "--target", "nowhere", "--data", "x", "--out", "y"], "nowhere"),
        (["train", "--target", "x"], "--data"),
        (["train", "--target", ".", "--data", "x", "--out", "y", "--set", "a", "--set", "=1"], "a, =1"),
        (["train", "--target", ".", "--data", "x", "--out", "y", "--set", "a=1", "--set", "a=2"], "a=2"),
    ],
)
def test_bad_input_is_exit_2_one_message_and_no_traceback(capsys, arguments, says):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert "Traceback" not in shown.err
    assert cli.main([*arguments, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert says in document["error"]
    assert document["findings"] == []


def test_a_refusal_carries_all_its_findings(capsys, monkeypatch):
    keys = ("block_size", "mask_token_id")
    findings = [Finding(code=k, severity=Severity.ERROR, key=k, value=0, message="bad", mend="mend it") for k in keys]

    def refuse():
        raise Refused("drafter x", findings)

    monkeypatch.setattr("dflash_plugins.pairs.listing", refuse)
    assert cli.main(["models", "list", "--json"]) == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert [f["key"] for f in document["findings"]] == list(keys)
    assert document["findings"][0] == {
        **{"code": "block_size", "severity": "error", "key": "block_size"},
        **{"value": 0, "message": "bad", "mend": "mend it"},
    }
    assert "mask_token_id" in shown.err
    assert "Traceback" not in shown.err


def test_a_fault_of_our_own_shows_where_and_is_no_verdict(capsys, monkeypatch):
    """Exit 1 means a bad answer: an unexpected exception must not look like one."""

    def break_down():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("dflash_plugins.pairs.listing", break_down)
    assert cli.main(["models", "list", "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"] == "oops"
    assert "break_down" in shown.err


def test_an_interruption_is_130(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_plugins.pairs.listing", interrupt)
    assert cli.main(["models", "list"]) == 130


class Report(BaseModel):
    """Stands in for what a command on top of an engine answers with."""

    lossless: bool

    @property
    def exit_code(self) -> int:
        return 0 if self.lossless else 1

    def render(self, console) -> None:
        console.print("for people")


@pytest.fixture
def engine(monkeypatch):
    """An engine that is there, and commands on top of it that answer at once. Returns what they were called with."""
    calls: list[dict] = []

    def run(*arguments, **options):
        calls.append({"arguments": arguments, **options})
        print("an engine that talks")
        options["progress"]("stage", 1, 2)
        return Report(lossless=options.get("seed", 0) == 0)

    monkeypatch.setattr("dflash_plugins.driver.find_driver", lambda name: f"driver of {name}")
    monkeypatch.setattr("dflash_plugins.pairs.resolve", lambda name, report=None: f"/models/{name}")
    monkeypatch.setattr("dflash_plugins.prove.run", run)
    monkeypatch.setattr("dflash_plugins.demo.run", run)
    return calls


PROVE = ["prove", "--engine", "e", "--target", "t", "--draft", "d"]


def test_prove_passes_everything_on(engine, capsys):
    given = "--k 3 --prompts demo --max-tokens 7 --temperature 0.5 --concurrency 8 --dtype bfloat16 --samples 9"
    assert (
        cli.main([*PROVE, *given.split(), "--drafter-independence", "--ignore-eos", "--set", "max_model_len=64"]) == 0
    )
    (call,) = engine
    assert call.pop("arguments") == ("e", "/models/t", "/models/d")
    assert callable(call.pop("progress"))
    assert call == {
        **{"k": 3, "prompts": "demo", "max_tokens": 7, "temperature": 0.5, "concurrency": 8, "dtype": "bfloat16"},
        **{"samples": 9, "drafter_independence": True, "ignore_eos": True, "seed": 0, "extra": {"max_model_len": 64}},
        "driver": "driver of e",
    }
    shown = capsys.readouterr()
    assert shown.out == "for people\n"
    assert "an engine that talks" in shown.err


@pytest.mark.parametrize(("seed", "code"), [("0", 0), ("1", 1)])
def test_a_bad_answer_is_exit_1_with_its_document(engine, capsys, seed, code):
    assert cli.main([*PROVE, "--seed", seed, "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"lossless": code == 0}


def test_demo_has_the_target_at_hand_before_it_starts(engine, capsys):
    assert cli.main(["demo", "--k", "2", "--json"]) == 0
    assert engine[0]["arguments"] == ("vllm", 2)
    assert json.loads(capsys.readouterr().out) == {"lossless": True}


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["train", "--target", ".", "--data", "x", "--out", "y"]) == 2
    assert "dflash-plugins[train]" in capsys.readouterr().err
