"""``ci/accept``: what counts as passed, what is run again, and what a result may hold."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest


@pytest.fixture
def accept(repository, monkeypatch, tmp_path):
    loader = importlib.machinery.SourceFileLoader("accept", str(repository / "ci" / "accept"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("accept", loader))
    monkeypatch.setitem(sys.modules, "accept", module)
    loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "tree_hash", lambda: "tree1")
    monkeypatch.setattr(module, "git", lambda *arguments: "7")  # as a commit: turn 7 modulo the share
    return module


@pytest.fixture
def ran(accept, monkeypatch):
    """Names of the cells that were run, in order; each answers with the JSON put into ``answers``."""
    names, answers = [], {}
    cells = [accept.Cell(name, "core", f"{name} --json", 10, faults_of) for name in "abcd"]
    monkeypatch.setattr(accept, "CELLS", cells)

    def run(argv, **options):
        name = argv[-1].split()[0]
        names.append(name)
        return types.SimpleNamespace(stdout=json.dumps(answers.get(name, {"good": True})), returncode=0)

    monkeypatch.setattr(accept.subprocess, "run", run)
    return types.SimpleNamespace(names=names, answers=answers, module=accept)


def faults_of(document):
    return [] if document["good"] else ["not good"]


def command_line(monkeypatch, module, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accept", *arguments])
    return module.main()


def test_a_second_run_goes_on_where_the_first_one_stopped(ran, monkeypatch):
    ran.answers["b"] = {"good": False}
    assert command_line(monkeypatch, ran.module) == 1
    ran.answers.clear()
    ran.names.clear()
    assert command_line(monkeypatch, ran.module) == 0
    assert ran.names == ["b"]
    assert command_line(monkeypatch, ran.module, "--again") == 0
    assert ran.names == ["b", "a", "b", "c", "d"]


def test_another_tree_is_another_matter(ran, monkeypatch):
    command_line(monkeypatch, ran.module, "--only", "a")
    monkeypatch.setattr(ran.module, "tree_hash", lambda: "tree2")
    command_line(monkeypatch, ran.module, "--only", "a")
    assert ran.names == ["a", "a"]


@pytest.mark.parametrize(("commit", "first"), [(0, "a"), (29, "a"), (30, "b"), (49, "d"), (50, "a"), (80, "b")])
def test_the_first_cell_is_the_one_of_a_minute_that_the_commit_chooses(ran, monkeypatch, commit, first):
    durations = {"a": 30, "b": 5, "c": 5, "d": 10}
    cells = [ran.module.Cell(name, "core", f"{name} --json", minutes) for name, minutes in durations.items()]
    monkeypatch.setattr(ran.module, "CELLS", cells)
    monkeypatch.setattr(ran.module, "git", lambda *arguments: f"{commit:x}")
    command_line(monkeypatch, ran.module, "--rotate")
    assert "".join(ran.names) == ("abcd" * 2)["abcd".index(first) :][:4]


def test_the_budget_leaves_out_what_would_not_end_in_time(ran, monkeypatch, capsys):
    assert command_line(monkeypatch, ran.module, "--budget", "5") == 0
    assert ran.names == []
    assert "left out for want of time: ['a', 'b', 'c', 'd']" in capsys.readouterr().out
    assert command_line(monkeypatch, ran.module, "--rotate", "--budget", "16") == 0
    assert len(ran.names) == 4
    assert "left out for want of time: none" in capsys.readouterr().out


def test_a_cell_over_time_or_without_an_answer_has_failed(ran, monkeypatch):
    monkeypatch.setattr(ran.module, "LATE", 0)

    def late(argv, *, timeout, **options):
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(ran.module.subprocess, "run", late)
    assert command_line(monkeypatch, ran.module, "--only", "a") == 1
    result = json.loads((ran.module.RESULTS / "a.json").read_text())
    assert result["passed"] is False
    assert "over time" in result["faults"][0]


def test_a_result_says_where_it_comes_from_and_no_path_of_the_machine(ran, monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_PLUGINS_CACHE", str(tmp_path / "elsewhere"))
    ran.answers["a"] = {"good": True, "path": str(Path.home() / "x"), "file": str(ran.module.CHECKOUT / "y")}
    ran.answers["a"]["model"] = str(tmp_path / "elsewhere" / "models")
    command_line(monkeypatch, ran.module, "--only", "a")
    result = json.loads((ran.module.RESULTS / "a.json").read_text())
    assert result["result"] == {"good": True, "path": "~/x", "file": "./y", "model": "~/.cache/dflash-plugins/models"}
    assert {"date", "tree", "pins", "machine", "environment", "command", "seconds"} <= set(result)


def demo_document(**changes):
    run = {"method": "dflash", "lossless": True, "speedup": 1.25, "emitted_per_round": 1.6} | changes
    return {"runs": [{"method": "plain", "lossless": True, "speedup": 1, "emitted_per_round": 1}, run]}


@pytest.mark.parametrize(
    ("changes", "faults", "slow"),
    [
        ({}, 0, 0),
        ({"lossless": False}, 1, 0),
        ({"speedup": 1.24}, 0, 1),
        ({"lossless": False, "speedup": 1.24, "emitted_per_round": 1.59}, 2, 1),
    ],
)
def test_what_the_demo_must_reach(accept, changes, faults, slow):
    document = demo_document(**changes)
    assert (len(accept.demo_faults(document)), len(accept.demo_slow(document))) == (faults, slow)


def test_the_demo_on_sglang_must_be_faster_than_plain(accept):
    assert accept.demo_not_faster(demo_document(speedup=1.01)) == []
    assert len(accept.demo_not_faster(demo_document(speedup=1.0))) == 1


def test_speed_counts_only_where_it_is_asked_for(ran, monkeypatch, capsys):
    cell = ran.module.Cell("a", "core", "a --json", 1, faults_of, lambda document: ["too slow"])
    monkeypatch.setattr(ran.module, "CELLS", [cell])
    assert command_line(monkeypatch, ran.module) == 1
    assert command_line(monkeypatch, ran.module, "--no-speed") == 0
    assert "too slow" in capsys.readouterr().out


def test_a_demo_without_a_drafter_is_no_pass(accept):
    assert accept.demo_faults({"runs": demo_document()["runs"][:1]}) != []


@pytest.mark.parametrize(
    ("tokens", "differences", "lossless", "passes"),
    [
        (15000, 2, True, True),
        (15000, 3, True, False),
        (100, 1, True, True),
        (7680, 1, True, True),
        (7680, 2, True, False),
        (99, 0, False, False),
    ],
)
def test_what_a_proof_must_say(accept, tokens, differences, lossless, passes):
    document = {"tokens": tokens, "differences": [{}] * differences, "lossless": lossless}
    assert (accept.prove_faults(document) == []) is passes


def overhead(empty=(0.98, 1.01), second=1.05, unused=(0.995, 1.002), same=True):
    return {
        "records": [
            {"what": "empty-loop", "ratio": 1.0, "ci95": list(empty), "same_ids": same},
            {"what": "second-pass", "ratio": second, "ci95": [second, second]},
            {"what": "unused", "ratio": 1.0, "ci95": list(unused), "same_ids": True},
        ]
    }


@pytest.mark.parametrize(
    ("changes", "slow"),
    [
        ({}, 0),
        ({"empty": (0.969, 1.1)}, 1),
        ({"second": 1.11}, 1),
        ({"unused": (0.9, 0.98)}, 1),
        ({"unused": (1.001, 1.009)}, 0),
        ({"empty": (0.9, 1.0), "second": 1.2, "unused": (1.02, 1.03)}, 3),
    ],
)
def test_what_the_suite_may_cost(accept, changes, slow):
    assert len(accept.overhead_slow(overhead(**changes))) == slow


def test_other_ids_are_a_fault_whatever_they_cost(accept):
    assert accept.same_ids_faults(overhead(same=False)) == ["empty-loop: ids differ"]
    assert accept.same_ids_faults(overhead()) == []
    assert accept.same_ids_faults({"records": []}) != []


def test_every_row_of_the_matrix_is_a_cell(accept, monkeypatch, tmp_path, repository):
    plan = tmp_path / "dflash_plugins" / "matrix" / "plan.toml"
    plan.parent.mkdir(parents=True)
    plan.write_bytes((repository / "dflash_plugins" / "matrix" / "plan.toml").read_bytes())
    book = tmp_path / "compat_matrix.yaml"
    book.write_text("rows:\n- id: sglang-0.5.21-dloop-greedy\n  x: 1\n- id: not-in-the-plan\n")
    monkeypatch.setattr(accept, "CHECKOUT", tmp_path)
    (cell,) = accept.matrix_cells()
    assert (cell.name, cell.environment) == ("matrix-sglang-0.5.21-dloop-greedy", "core")
    assert cell.command.endswith("matrix run --compare --json --row sglang-0.5.21-dloop-greedy")
    assert cell.faults is accept.matrix_faults


@pytest.mark.parametrize(
    ("faults", "numerical", "found"), [((), 1, 0), (("the floor is 1.44",), 1, 1), ((), 2, 1), (("lossy",), 3, 2)]
)
def test_what_a_rerun_of_a_row_must_say(accept, faults, numerical, found):
    proof = {"tokens": 3800, "ties": 0, "numerical": numerical}
    run = {"id": "r1", "faults": list(faults), "row": {"results": {"proof": proof}}}
    assert len(accept.matrix_faults({"runs": [run]})) == found
    assert accept.matrix_faults({"runs": [run | {"row": None}]}) == list(faults)
    assert accept.matrix_faults({"runs": []}) == ["no run"]
