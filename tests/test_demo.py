"""``demo`` on a fake engine: turns, ratios within an alternation, verdicts, JSON."""

import io

import pytest
from fake_engine import FakeDriver
from rich.console import Console

from dflash_plugins import demo
from dflash_plugins.driver import EngineConfig
from dflash_plugins.errors import BadInput
from dflash_plugins.pairs.prompts import Prompt

PROMPTS = tuple(Prompt(id=f"p{n}", set="ab"[n % 2], prompt=f"prompt {n}") for n in range(3))
PLAIN = EngineConfig(target="a/target", dtype="bfloat16")
CONTESTANTS = (
    demo.Contestant("plain", None, PLAIN),
    demo.Contestant("dflash", None, PLAIN.model_copy(update={"draft": "d", "k": 3})),
    demo.Contestant("dloop", "refine", PLAIN.model_copy(update={"draft": "l", "k": 7})),
)


def shown(driver, **options):
    defaults = {"contestants": CONTESTANTS, "prompts": PROMPTS, "tokens": 8, "alternations": 3}
    return demo.run(driver=driver, **(defaults | options))


def test_runs_and_keys():
    report = shown(FakeDriver())
    runs = report.model_dump(mode="json")["runs"]
    keys = {"method", "mode", "lossless", "emitted_per_round", "tokens_per_s", "speedup", "speedup_ci95"}
    assert all(keys <= set(run) for run in runs)
    assert [(run["method"], run["mode"]) for run in runs] == [("plain", None), ("dflash", None), ("dloop", "refine")]
    # Two seconds plain and one with speculation for eight tokens, three prompts per alternation.
    assert [run["tokens_per_s"] for run in runs] == [4.0, 8.0, 8.0]
    assert [run["speedup"] for run in runs] == [1.0, 2.0, 2.0]
    assert runs[1]["speedup_ci95"] == pytest.approx([2.0, 2.0])
    assert [run["emitted_per_round"] for run in runs] == [1.0, 2.0, 2.0]
    assert runs[1]["emitted_per_round_by_set"] == {"a": 2.0, "b": 2.0}
    assert report.exit_code == 0
    assert report.target == "target"


def test_every_method_takes_turns_on_every_prompt_and_the_warm_up_is_not_measured():
    slow_start = FakeDriver(seconds=lambda name, call: 1000.0 if call <= 9 else 2.0 if name == "plain" else 1.0)
    report = shown(slow_start)
    assert [run.speedup for run in report.runs] == [1.0, 2.0, 2.0]
    names = [name for name, _, _ in slow_start.calls]
    turns = [names[start : start + 3] for start in range(0, 4 * 9, 3)]
    assert all(sorted(turn) == ["K3", "K7", "plain"] for turn in turns)
    assert {turn[0] for turn in turns} == {"K3", "K7", "plain"}


def test_a_machine_that_slows_down_does_not_widen_the_interval():
    report = shown(FakeDriver(seconds=lambda name, call: (2.0 if name == "plain" else 1.0) * (1 + (call - 1) // 9)))
    assert report.runs[1].speedup == pytest.approx(2.0)
    assert report.runs[1].speedup_ci95 == pytest.approx((2.0, 2.0))


def test_batch_one_and_no_end_of_text():
    driver = FakeDriver()
    shown(driver)
    assert all(len(prompts) == 1 and how.ignore_eos and how.temperature == 0 for _, prompts, how in driver.calls)


@pytest.mark.parametrize(("gap", "verdict", "code"), [(0.125, "numerical", 0), (0.6, "FAIL", 1)])
def test_verdict_on_the_ids(gap, verdict, code):
    report = shown(FakeDriver(deviate=lambda prompt, position: position == 5, gap=gap))
    assert report.exit_code == code
    # Three prompts in three alternations, each listed once.
    assert [d.verdict for d in report.runs[1].differences] == [verdict] * 3
    assert report.runs[1].lossless == (code == 0)
    assert report.texts[0].same == ()


def test_flags_that_differ_are_refused():
    with pytest.raises(BadInput, match="besides speculation"):
        shown(FakeDriver(flags={"block_size": 1}))


def test_people_see_text_and_figures():
    console = Console(width=200, record=True, file=io.StringIO())
    shown(FakeDriver()).render(console)
    text = console.export_text()
    for word in ("dloop (refine)", "2.00 x", "text", "no FAIL", "p2"):
        assert word in text
