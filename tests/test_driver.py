"""The worker-process client on toy workers: answers, errors, deaths, and no process left behind."""

import os
import sys
import textwrap
import time

import pytest

from dflash_plugins import driver
from dflash_plugins.driver import (
    Counters,
    EngineConfig,
    EngineError,
    Hello,
    Sampling,
    WorkerProcess,
    require_comparable,
)
from dflash_plugins.errors import BadInput, EngineMissing

HELLO = """
import json, os, sys, time
def send(**message):
    print(json.dumps(message), flush=True)
flags = {"pid": os.getpid(), "target": json.loads(sys.argv[1])["target"]}
send(result={"engine": "toy", "version": "1", "flags": flags})
"""


def toy(body, prologue=HELLO):
    script = prologue + textwrap.dedent(body)
    return WorkerProcess([sys.executable, "-c", script], EngineConfig(target="t"), os.environ)


def gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_request_and_its_progress():
    answer = {"completions": [{"ids": [5, 6], "text": "x", "finish_reason": "length"}], "seconds": 0.5, "counters": {}}
    body = f"""
    for line in sys.stdin:
        request = json.loads(line)
        assert request["prompts"] == [[1, 2]] and request["sampling"]["max_tokens"] == 9
        send(progress=[1, 2])
        send(progress=[2, 2])
        send(result={answer!r})
    """
    seen = []
    with toy(body) as worker:
        generated = worker.generate([(1, 2)], Sampling(max_tokens=9), lambda done, total: seen.append((done, total)))
        assert worker.hello.flags["target"] == "t"
    assert generated.completions[0].ids == (5, 6)
    assert generated.tokens == 2
    assert seen == [(1, 2), (2, 2)]


def test_an_error_is_told_and_the_worker_lives_on():
    body = """
    for line in sys.stdin:
        if json.loads(line)["texts"] == ["bad"]:
            send(error="ValueError: no such thing")
        else:
            send(result=[[1]])
    """
    with toy(body) as worker:
        with pytest.raises(EngineError, match="ValueError: no such thing"):
            worker.encode(["bad"])
        assert worker.encode(["good"]) == [[1]]


def test_a_death_is_told_with_the_last_lines_and_the_status():
    with toy("sys.stdin.readline(); print('lost my mind', file=sys.stderr); sys.exit(7)") as worker:
        with pytest.raises(EngineError, match=r"exit status 7(.|\n)*lost my mind"):
            worker.encode(["x"])
        with pytest.raises(EngineError, match="exit status 7"):
            worker.encode(["x"])


def test_a_death_at_the_start_is_told():
    with pytest.raises(EngineError, match="cannot start"):
        toy("", prologue="raise SystemExit('cannot start')")


def test_closing_ends_the_process_and_what_it_started(monkeypatch):
    monkeypatch.setattr(driver, "CLOSE_SECONDS", 0.2)
    body = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sys.stdin.readline()
    send(result=[[child.pid]])
    time.sleep(60)
    """
    with toy(body) as worker:
        pid = worker.hello.flags["pid"]
        [[child]] = worker.encode(["x"])
    assert gone(pid)
    assert gone(child)
    worker.close()
    with pytest.raises(EngineError, match="closed"):
        worker.encode(["x"])


def test_counters_add_and_divide():
    """F37: accepts 3, 0, 7 of K = 7."""
    parts = [
        Counters(rounds=1, proposed=7, accepted=a, accepted_by_slot=tuple(int(slot < a) for slot in range(7)))
        for a in (3, 0, 7)
    ]
    total = sum(parts, Counters())
    assert total.emitted_per_round == pytest.approx(4.3333, abs=1e-4)
    assert (total.accepted, total.proposed) == (10, 21)
    assert total.rates_by_slot == pytest.approx((2 / 3,) * 3 + (1 / 3,) * 4)
    assert Counters().emitted_per_round == 1.0


def test_plain_differs_in_speculation_only():
    config = EngineConfig(target="t", draft="d", k=3, draft_sample_method="probabilistic", dtype="bfloat16", seed=4)
    plain = config.plain()
    changed = {name for name, value in plain if value != getattr(config, name)}
    assert changed == {"draft", "k", "draft_sample_method"}


def test_an_ab_of_different_flags_names_all_of_them():
    """F40."""
    first = Hello(engine="e", version="1", flags={"a": 1, "b": 2, "c": 3})
    second = Hello(engine="e", version="1", flags={"a": 1, "b": 5})
    with pytest.raises(BadInput, match=r"differs in 2 flags besides speculation: b \(2 and 5\), c \(3 and None\)"):
        require_comparable(first, second)
    require_comparable(first, first)


class Missing:
    def missing(self):
        return "toy is not installed"


class Point:
    name = "toy"

    def load(self):
        return Missing


def test_unknown_and_missing_engines(monkeypatch):
    monkeypatch.setattr(driver, "entry_points", lambda group: [Point()] if group == "dflash_plugins.drivers" else [])
    with pytest.raises(BadInput, match="no driver for engine 'other'; known: toy"):
        driver.find_driver("other")
    with pytest.raises(EngineMissing, match="toy is not installed"):
        driver.find_driver("toy")
