"""``check``: published pairs are fine, every fault is found alone and among others, and nothing makes it stumble."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from published import PUBLISHED, mimo, qwen38_27b_dflash2
from rich.console import Console

from dflash_plugins.findings import Severity
from dflash_plugins.report import CheckReport

SERVED_BY = {
    "muse_glimmer_assistant": {"vllm"}, "laguna": {"vllm"}, "speculators_dflash": {"vllm"},
    "speculators_dflash2": {"vllm"},
}  # fmt: skip
ENGINES = (("vllm", "0.31.0"), ("vllm", "0.32.0"), ("sglang", "0.5.21"), ("sglang", "0.5.23"))


def found(report: CheckReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.severity.value) for finding in report.findings}


def screen(report: CheckReport, width: int = 100) -> str:
    console = Console(width=width, height=40, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    report.render(console)
    return console.export_text()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_a_published_pair_has_no_error(tmp_path: Path, name: str, engine: str, version: str) -> None:
    if engine not in SERVED_BY.get(name, {engine}):
        pytest.skip("no version of this engine was seen to read this layout")
    pair = PUBLISHED[name]()
    pair.engine, pair.version = engine, version
    started = time.process_time()
    report = pair.check(tmp_path / "pair")
    assert time.process_time() - started < 2
    assert [f.code for f in report.findings if f.severity is Severity.ERROR] == []
    assert report.launch


@pytest.mark.parametrize("name", ["muse_glimmer_assistant", "laguna", "mimo"])
def test_what_only_the_engine_computes_is_said(tmp_path: Path, name: str) -> None:
    report = PUBLISHED[name]().check(tmp_path / "pair")
    assert report.verdict == "engine-alone"
    assert report.exit_code == 0
    assert "engine alone" in screen(report)


def test_on_a_cpu_the_plugin_is_in_the_way_of_it(tmp_path: Path) -> None:
    pair = mimo()
    pair.settings["device"] = "cpu"
    assert ("config-unsupported", "error") in found(pair.check(tmp_path / "pair"))


@pytest.mark.parametrize("name", ["speculators_dflash", "speculators_dflash2"])
def test_sglang_does_not_read_the_flat_layout(tmp_path: Path, name: str) -> None:
    pair = PUBLISHED[name]()
    pair.engine, pair.version = "sglang", "0.5.21"
    assert ("sglang-flat-layout", "error") in found(pair.check(tmp_path / "pair"))


def test_headers_without_data_are_enough(tmp_path: Path) -> None:
    report = qwen38_27b_dflash2().check(tmp_path / "pair", data=False)
    assert (report.exit_code, ("headers-only", "info") in found(report)) == (0, True)


# -- faults


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_alone_is_found(tmp_path: Path, fault: Fault) -> None:
    pair = qwen38_27b_dflash2()
    before = found(pair.check(tmp_path / "right"))
    fault.change(pair)
    report = pair.check(tmp_path / "wrong")
    (named, *_) = [f for f in report.findings if f.code == fault.code and f.severity.value == fault.severity] or [None]
    assert named is not None, found(report) - before
    assert fault.words in f"{named.key} {named.message} {named.mend}"
    assert report.exit_code == (1 if Severity.ERROR in {f.severity for f in report.findings} else 0)
    assert bool(report.launch) is (report.exit_code == 0)
    assert named.message
    assert named.mend


def test_three_faults_at_once_are_all_found(tmp_path: Path) -> None:
    """300 seeded triples of faults that do not touch the same thing."""
    chosen = random.Random(20261130)
    triples = []
    while len(triples) < 300:
        three = chosen.sample(FAULTS, 3)
        if all(not {*a.touches} & {*b.touches} for a, b in itertools.combinations(three, 2)):
            triples.append(three)
    lost = []
    for number, three in enumerate(triples):
        pair = qwen38_27b_dflash2()
        for fault in three:
            fault.change(pair)
        report = pair.check(tmp_path / str(number), data=False)
        lost += [
            (fault.name, [other.name for other in three])
            for fault in three
            if fault.code not in {finding.code for finding in report.findings}
        ]
    assert lost == [], "\n".join(map(str, lost))
