"""``serve --probe`` beside a small HTTP server: what it says, what it leaves alone, signals and exit codes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matrix_rows import results, row

from dflash_plugins import probe, serve
from dflash_plugins.driver import Counters
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.parent import FORWARDED
from dflash_plugins.report import EngineSummary, MatrixSummary, ServeReport
from dflash_plugins.suspects import KINDS, suspects

pytest.importorskip("requests")
pytest.importorskip("prometheus_client")

SERVER = Path(__file__).with_name("fake_server.py")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def report(settings, engine="vllm", findings=(), status="untested", port=None):
    about = {"version": "1", "version_from": "given", "platform": None, "runner": None}
    return ServeReport(
        target="t", draft_name="d", engine=EngineSummary(name=engine, **about), verdict="ok", draft=None, k=3,
        findings=findings, matrix=MatrixSummary(status=status),
        launch=(sys.executable, str(SERVER), "--port", str(port or free_port()), json.dumps(settings)),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(probe, "POLL_SECONDS", 0.05)


@pytest.fixture
def said(capfd, monkeypatch):
    """Runs a server beside the probe until that has spoken: what was said on stderr, and the exit code."""

    def run(engine="vllm", floor=None, **settings):
        planned = report(settings, engine)
        say, port = serve._say, planned.launch[3]

        def last_words(text, warning):
            say(text, warning)
            with contextlib.suppress(OSError, http.client.HTTPException):
                http.client.HTTPConnection("127.0.0.1", int(port), timeout=5).request("GET", "/end")

        monkeypatch.setattr(serve, "_say", last_words)
        code = serve.stay_beside(planned, floor)
        return capfd.readouterr().err, code

    return run


def test_a_good_drafter_is_one_line_and_the_exit_code_is_the_servers(said):
    text, code = said(dies=7, ready_after=0.5, floor=1.9)
    assert code == 7
    assert text.splitlines() == [
        "dflash-plugins serve --probe: 2.00 emitted per round (20 rounds, 60 proposals, 20 accepted); "
        "the tested row's floor is 1.90"
    ]


def test_below_the_floor_is_a_loud_warning_with_suspects(said):
    text, code = said(floor=2.5)
    assert code == 0
    assert "WARNING" in text
    assert "floor is 2.50" in text
    assert all(f"  {n}. {kind.words[:20]}" in text for n, kind in enumerate(KINDS, 1))


def test_nothing_accepted_is_a_loud_warning_without_any_floor(said):
    text, _ = said(accepted=0)
    assert "WARNING" in text
    assert "60 proposals, 0 accepted" in text


def test_a_target_without_a_chat_template_is_asked_plainly(said):
    assert "2.00 emitted" in said(chat=False)[0]


@pytest.mark.parametrize("metrics", [True, False])
def test_sglangs_answers_say_more_than_its_metrics(said, metrics):
    assert (
        "3.00 emitted per round (20 rounds, 60 proposals, 40"
        in said("sglang", details=True, accepted=2, metrics=metrics)[0]
    )


def test_nothing_accepted_shows_in_sglangs_metrics(said):
    assert "60 proposals, 0 accepted" in said("sglang", accepted=0)[0]


def test_sglangs_metrics_where_its_answers_say_nothing(said):
    assert "3.00 emitted per round (20 rounds, 60 proposals, 40" in said("sglang", accepted=2)[0]


def test_a_server_that_says_nothing_could_not_be_probed(said):
    text, code = said(metrics=False, dies=3)
    assert "could not be probed: neither its answers nor its metrics" in text
    assert code == 3


def test_a_server_that_never_comes_up_is_left_to_say_so(said):
    assert said(ready_after=None, lives=1, dies=5) == ("", 5)


def test_one_that_dies_while_it_is_waited_for_says_so_itself(said):
    assert said(ready_after=30, lives=0.5, dies=4) == ("", 4)


def test_another_server_is_not_mistaken_for_ours(capfd):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        planned = report({"lives": 0}, port=port)
        beside = probe.probing(planned, {"port": port}, lambda text, warning: print(text, warning, file=sys.stderr))
        beside(None)
    assert f"something listens on port {port} already True" in capfd.readouterr().err


# -- signals, in a process of its own

RUN = """
import sys
from dflash_plugins.parent import run_beside
sys.exit(run_beside(sys.argv[1:], lambda over: over.wait()))
"""


def heed_signals():
    """These tests may run in the background or under nohup, where signals are ignored, which a parent leaves so."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def parent(tmp_path, repository):
    """``parent(**settings)``: a process beside a server; (process, server's pid, server's log)."""
    processes = []

    def start(before=(), **settings):
        log = tmp_path / "signals"
        argv = report({"log": str(log)} | settings).launch
        environment = os.environ | {"PYTHONPATH": str(repository)}
        process = subprocess.Popen(
            [*before, sys.executable, "-c", RUN, *argv], env=environment, start_new_session=True,
            preexec_fn=heed_signals,
        )  # fmt: skip
        processes.append(process)
        assert until(lambda: log.exists() and log.read_text())
        return process, int(log.read_text()), log

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def gone(pid):
    """Ended, and not only waiting to be collected by a parent that is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@LINUX
def test_signals_reach_the_server_which_decides(parent):
    process, pid, log = parent(dies=9)
    for sign in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(sign)
        assert until(lambda sign=sign: sign.name in log.read_text())
    assert process.poll() is None
    process.terminate()
    assert process.wait(20) == 9
    assert gone(pid)
    assert log.read_text().split()[1:] == ["SIGINT", "SIGHUP", "SIGTERM"]


@LINUX
def test_a_server_does_not_outlive_a_parent_that_is_killed(parent):
    process, pid, log = parent()
    process.kill()
    assert until(lambda: gone(pid))
    assert "SIGTERM" in log.read_text()


@LINUX
def test_a_server_that_was_killed_is_128_and_the_signal(parent):
    process, pid, _ = parent()
    os.kill(pid, signal.SIGKILL)
    assert process.wait(20) == 128 + signal.SIGKILL


# -- what decides


def test_verdicts():
    def verdict(rounds, accepted, floor=None):
        return probe.judge(Counters(rounds=rounds, proposed=3 * rounds, accepted=accepted), floor).verdict

    assert verdict(0, 0) == "no round"
    assert verdict(10, 0) == "good"  # 30 proposals may be bad luck
    assert verdict(11, 0) == "nothing accepted"
    assert verdict(10, 5, 1.5) == "good"
    assert verdict(10, 5, 1.51) == "below floor"


def test_the_floor_is_the_least_of_the_rows_of_a_tested_pair_with_this_k():
    rows = tuple(
        row(f"r{n}", launch__k=k, results=results(emitted))
        for n, (k, emitted) in enumerate(((3, 2.0), (3, 1.5), (7, 1.2)))
    )
    assert probe.floor_of(MatrixSummary(status="tested", rows=rows), 3) == 1.35
    sampled = row("r3", launch__decoding="sampled", launch__temperature=1.0, results=results(1.4))
    assert probe.floor_of(MatrixSummary(status="tested", rows=(sampled,)), 7) == 1.26
    assert probe.floor_of(MatrixSummary(status="tested", rows=(*rows, sampled)), 7) == 1.08  # of the greedy one
    assert probe.floor_of(MatrixSummary(status="tested", rows=rows), 5) is None
    assert probe.floor_of(MatrixSummary(status="untested", rows=rows), 3) is None  # of another revision


def test_suspects_begin_with_what_was_found_worst_first():
    def one(code, severity):
        return Finding.of(severity, code, "key", 1, "message", "mend")

    found = (
        one("dtype-cast", Severity.WARNING), one("pair-rope-theta", Severity.WARNING),
        one("k-below-block", Severity.INFO), one("headers-only", Severity.INFO),
    )  # fmt: skip
    lines = list(suspects(report({}, findings=found, status="tested")))
    assert [line.partition("]")[0] for line in lines[:3]] == ["[pair-rope-theta", "[dtype-cast", "[k-below-block"]
    words = " ".join(lines[3:])
    assert not any(one in words for one in ("rope theta", "K against B", "quantisation", "untested", "headers-only"))
    assert "mask token" in words


def test_where_a_server_is_asked(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert probe.address_of("vllm", {"host": "0.0.0.0"}) == probe.Address(
        "http://127.0.0.1:8000", 8000, "127.0.0.1", "secret"
    )
    address = probe.address_of("sglang", {"host": "::1", "port": "7", "ssl_certfile": "c"})
    assert (address.url, address.key) == ("https://[::1]:7", None)
    with pytest.raises(probe.Unprobed, match="socket"):
        probe.address_of("vllm", {"uds": "here"})
