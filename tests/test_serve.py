"""``serve``: the command line of the engine's own server, what is refused before, and what becomes of the process."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import tiny

from dflash_plugins import cli, serve
from dflash_plugins.engines import ENGINES, engine_facts
from dflash_plugins.errors import BadInput
from dflash_plugins.hub import Model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    drafter = tiny.write_drafter(folder / "draft", tiny.raw_config("dloop"))
    return tiny.write_target(folder / "target"), drafter


def launch(engine, pair, *flags, **options):
    report = serve.plan(engine, *pair, flags=flags, **options)
    assert report.launch[:3] == (sys.executable, "-m", engine_facts(engine).servers[-1].module)
    return report.launch[3:]


def speculation(argv):
    return json.loads(argv[argv.index("--speculative-config") + 1])


def test_vllm_is_told_k_proposals(pair):
    argv = launch("vllm", pair, "--dtype", "float32", k=3, port=8080)
    assert speculation(argv) == {"method": "dflash", "model": str(pair[1]), "num_speculative_tokens": 3}
    assert argv[:2] == ("--model", str(pair[0]))
    assert argv[4:] == ("--port", "8080", "--dtype", "float32")


def test_sglang_is_told_the_block(pair):
    assert launch("sglang", pair, "--device=cpu", k=3, name="tiny") == (
        *("--model-path", str(pair[0]), "--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(pair[1]), "--speculative-num-draft-tokens", "4"),
        *("--served-model-name", "tiny", "--device=cpu"),
    )


def test_without_k_it_is_what_the_drafter_was_trained_for(pair):
    assert speculation(launch("vllm", pair))["num_speculative_tokens"] == tiny.BLOCK - 1
    argv = launch("sglang", pair)
    assert argv[argv.index("--speculative-num-draft-tokens") + 1] == str(tiny.BLOCK)


@pytest.mark.parametrize("flag", [("--speculative-num-draft-tokens", "4"), ("--speculative-dflash-block-size=4",)])
@pytest.mark.parametrize("k", [None, 3])
def test_a_flag_of_the_engine_that_says_k_is_left_alone(pair, flag, k):
    argv = launch("sglang", pair, *flag, k=k)
    assert argv[6:] == flag


def test_where_vllm_goes_by_its_name_its_own_command_serves(pair, monkeypatch):
    monkeypatch.setattr(serve, "version", lambda name: "0.31.0")
    flags = ("--api-server-count", "2")
    argv = serve.plan("vllm", *pair, flags=flags).launch
    assert argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", str(pair[0]))
    monkeypatch.undo()
    with pytest.raises(BadInput, match="has no --api-server-count"):
        serve.plan("vllm", *pair, flags=flags)


def test_a_name_that_the_user_gives_wins(pair):
    argv = launch("vllm", pair, "--served-model-name", "mine", name="tiny")
    assert argv.count("--served-model-name") == 1


@pytest.mark.parametrize(
    ("engine", "flags", "says"),
    [
        ("sglang", ("--speculative-num-draft-tokens", "5"), "K = 4"),
        ("sglang", ("--speculative-num-draft-tokens", "4", "--speculative-dflash-block-size", "5"), "disagree"),
        ("sglang", ("--speculative-num-draft-tokens", "1"), "from 2 on"),
        ("sglang", ("--speculative-num-draft-tokens",), "from 2 on"),
        ("sglang", ("--speculative-draft-model", "x", "--model=y"), "--model, --speculative-draft-model"),
        ("vllm", ("--speculative-config.method", "mtp"), "--speculative-config.method"),
        ("vllm", ("-sc", "{}", "--speculative_config={}"), "--sc, --speculative-config"),
        ("vllm", ("--port=1",), "--port"),
    ],
)
def test_flags_that_are_decided_or_disagree_are_bad_input(pair, engine, flags, says):
    with pytest.raises(BadInput, match=says):
        serve.plan(engine, *pair, k=3, port=8000, flags=flags)


def test_other_flags_pass(pair):
    flags = ("-tp", "1", "--port", "8000", "--seed", "-1", "--model-impl", "auto")
    assert launch("vllm", pair, *flags)[4:] == flags


def test_a_flag_that_vllm_and_a_plan_both_have_is_vllms(pair):
    assert launch("vllm", pair, "--runner", "generate")[4:] == ("--runner", "generate")


@pytest.mark.parametrize(("value", "runner"), [("1", "v2"), ("0", "v1"), (None, None)])
def test_the_runner_is_the_one_the_environment_asks_for(monkeypatch, tmp_path, value, runner):
    monkeypatch.setattr(serve, "_package", lambda facts: tmp_path)
    monkeypatch.setattr(serve, "version", lambda name: "0.31.0")
    monkeypatch.delenv(serve.RUNNER_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(serve.RUNNER_VARIABLE, value)
    assert serve.launch_of(engine_facts("vllm"), None, {}).runner == runner
    assert serve.launch_of(engine_facts("sglang"), None, {}).runner is None


def test_what_sglang_needs_in_its_environment_on_a_cpu(pair, monkeypatch, tmp_path):
    """Without it the server ends a minute later, asking for a module of vLLM."""
    monkeypatch.setattr(serve, "_package", lambda facts: tmp_path)
    monkeypatch.setattr(serve, "version", lambda name: "0.5.21")
    wanted = engine_facts("sglang").variables["cpu"]
    for name in wanted:
        monkeypatch.delenv(name, raising=False)

    def missing(*flags):
        return [one.key for one in serve.plan("sglang", *pair, k=3, flags=flags).findings if one.code == "environment"]

    assert missing("--device", "cpu") == [*wanted]
    assert missing() == []
    target, draft = (Model(str(folder), folder) for folder in pair)
    planned = serve.check("sglang", target, draft, settings={"device": "cpu"})
    assert "environment" not in {one.code for one in planned.findings}
    assert planned.launch[: 1 + len(wanted)] == ("env", *(f"{name}={value}" for name, value in wanted.items()))
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    assert missing("--device", "cpu") == []


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unfit_pair_is_not_served_and_says_everything(pair, tmp_path, engine):
    drafter = tiny.write_drafter(tmp_path / "draft", tiny.raw_config("dflash", vocab_size=96))
    report = serve.plan(engine, pair[0], drafter, k=3)
    assert (report.launch, report.exit_code) == ((), 1)
    assert {"pair-vocabulary", "mask-token-range"} <= {one.code for one in report.findings}


# -- the command


@pytest.fixture
def started(monkeypatch):
    """Command lines that the process was replaced with."""
    found = []
    monkeypatch.setattr("dflash_plugins.driver.find_driver", lambda name: None)
    monkeypatch.setattr(serve, "replace_process", lambda launch: found.append(tuple(launch)))
    return found


def arguments(pair, engine="vllm", *more):
    return ["serve", "--engine", engine, "--target", str(pair[0]), "--draft", str(pair[1]), *more]


def test_the_process_becomes_the_server(pair, started, capfd):
    assert cli.main(arguments(pair, "sglang", "--k", "3", "--", "--device", "cpu")) == 0
    assert started == [serve.plan("sglang", *pair, k=3, flags=("--device", "cpu")).launch]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shlex.split(shown.err.splitlines()[-1]) == list(started[0])


def test_refused_is_exit_1_and_nothing_starts(pair, started, capfd, tmp_path):
    drafter = tiny.write_drafter(tmp_path / "draft", tiny.raw_config("dflash", vocab_size=96))
    assert cli.main(arguments((pair[0], drafter))) == 1
    assert started == []
    assert "pair-vocabulary" in capfd.readouterr().err


def test_a_flag_before_the_dashes_is_a_usage_error(pair, started, capsys):
    assert cli.main(arguments(pair, "vllm", "--dtype", "float32")) == 2
    assert "--dtype" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_exit_2(pair, capsys):
    assert cli.main(arguments(pair, "nope")) == 2
    assert "'nope'" in capsys.readouterr().err


def test_the_document_stands_alone_on_stdout(pair, python, tmp_path):
    """Everything for real but the engine, which is a script that prints."""
    (tmp_path / "engine_server.py").write_text("print('the server talks')")
    script = """
import sys
sys.path.insert(0, {folder!r})
from dflash_plugins import cli, driver, engines, serve
driver.find_driver = lambda name: None
facts = engines.engine_facts("vllm").model_copy(update={{"servers": (engines.Server(module="engine_server"),)}})
serve.engine_facts = lambda name: facts
import os
os.environ["PYTHONPATH"] = {folder!r}
sys.exit(cli.main(sys.argv[1:]))
"""
    done = python("-c", script.format(folder=str(tmp_path)), *arguments(pair, "vllm", "--json"))
    document = json.loads(done.stdout)
    assert document["launch"][:3] == [sys.executable, "-m", "engine_server"]
    assert {one["severity"] for one in document["findings"]} <= {"info", "warning"}
    assert "the server talks" in done.stderr
    assert done.returncode == 0
    assert Path(document["launch"][3]) == pair[0]
