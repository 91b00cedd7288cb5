"""``bench`` and ``report`` on a fake engine: turns, medians, break-even, best K, what is refused, files."""

import io
import json

import pytest
import tiny
from fake_engine import FakeDriver
from rich.console import Console

from dflash_plugins import bench, cli
from dflash_plugins.bench_report import BenchReport, break_even, break_even_words, pays_best
from dflash_plugins.bench_rows import gaps, percentiles
from dflash_plugins.driver import Completion
from dflash_plugins.errors import BadInput

PROMPTS = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    return tiny.write_target(base / "target"), tiny.write_drafter(base / "draft", tiny.raw_config())


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "ids": [n, n + 1]}) + "\n" for n in range(PROMPTS)))
    return path


@pytest.fixture
def measured(pair, prompts):
    def run(driver, **options):
        defaults = {"max_tokens": 9, "runs": 3, "concurrency": (1, 2), "ks": (3,)}
        return bench.run("vllm", *pair, prompts=prompts, driver=driver, **(defaults | options))

    return run


def test_keys_and_numbers(measured):
    report = measured(FakeDriver())
    keys = {"concurrency", "plain_tps", "spec_tps", "speedup", "emitted_per_round", "accepted_by_slot"}
    document = report.model_dump(mode="json")
    assert all(keys <= set(row) for row in document["rows"])
    assert {"break_even_concurrency", "best_k"} <= set(document)
    # Two seconds plain and one with speculation for a wave of nine tokens each.
    assert [(row.concurrency, row.plain_tps, row.spec_tps) for row in report.rows] == [(1, 4.5, 9.0), (2, 9.0, 18.0)]
    assert [row.speedup for row in report.rows] == [2.0, 2.0]
    assert [row.speedup_ci95 for row in report.rows] == [(2.0, 2.0)] * 2
    assert [row.emitted_per_round for row in report.rows] == [2.0, 2.0]
    assert report.rows[0].accepted_by_slot == (1.0, 0.0, 0.0)
    assert (report.best_k, report.break_even_concurrency, report.exit_code) == (None, None, 0)
    assert report.speedup_by_concurrency() == {1: 2.0, 2: 2.0}
    assert BenchReport.model_validate_json(report.model_dump_json()) == report


def test_by_wall_a_round_is_all_of_the_time_and_latencies_are_unknown(measured):
    first, second = measured(FakeDriver()).rows
    assert (first.cycle.timed_by, first.cycle.round_ms) == ("wall", 100.0)  # a second for ten rounds
    assert first.cycle.ar_ms == pytest.approx(2000 / 9)
    assert second.cycle.round_ms == 200.0  # of ten rounds by two requests, five each
    assert first.predicted_speedup == pytest.approx(2000 / 9 * 2 / 100)
    assert (first.plain_latency, first.spec_latency, first.cycle.draft_ms) == (None, None, None)
    assert "seen from outside" in first.cycle.not_split_because


def test_where_the_engine_says_when_tokens_came(measured):
    row = measured(FakeDriver(tells_times=True)).rows[0]
    assert (row.cycle.timed_by, row.cycle.ar_ms, row.cycle.round_ms) == ("steps", 250.0, 500.0)
    assert row.predicted_speedup == 1.0
    assert row.plain_latency.ttft_ms.p50 == row.spec_latency.ttft_ms.p99 == 1000.0
    assert row.spec_latency.inter_token_ms.p50 == 250.0


def test_the_parts_of_a_round_where_the_engine_is_timed_inside(measured):
    cycle = measured(FakeDriver(tells_times=True, parts=((0.1, 0.3), (0.2, 0.25), (0.1, 0.3)))).rows[0].cycle
    assert (cycle.draft_ms, cycle.verify_ms, cycle.not_split_because) == (100.0, 300.0, None)
    assert cycle.overhead_ms == pytest.approx(100.0)


def test_engines_take_turns_on_full_waves_and_the_warm_up_is_not_measured(measured):
    calls = 3 * (5 + 3)  # three engines, five waves of one and three of two

    def seconds(name, call):
        return 1000.0 if call <= calls else 2.0 if name == "plain" else 1.0

    driver = FakeDriver(seconds=seconds)
    report = measured(driver, ks=(3, 2))
    assert [row.speedup for row in report.rows] == [2.0] * 4
    assert len(driver.calls) == 4 * calls
    turns = [[name for name, _, _ in driver.calls[start : start + 3]] for start in range(0, 4 * calls, 3)]
    assert all(sorted(turn) == ["K2", "K3", "plain"] for turn in turns)
    assert {turn[0] for turn in turns} == {"K2", "K3", "plain"}
    assert {len(wave) for _, wave, _ in driver.calls} == {1, 2}
    assert all(how.ignore_eos and how.temperature == 0 for _, _, how in driver.calls)
    assert driver.started[0].config.memory_share == pytest.approx(1 / 3)
    assert all(session.closed for session in driver.started)


def test_one_slow_run_moves_no_median(measured):
    last = 2 * 5 * 3  # of four runs of ten waves, the one after the third

    report = measured(
        FakeDriver(seconds=lambda name, call: (2.0 if name == "plain" else 1.0) * (50 if call > last else 1)),
        concurrency=(1,),
    )
    assert (report.rows[0].plain_tps, report.rows[0].speedup) == (4.5, 2.0)


def test_best_k_is_the_one_that_pays_best(measured):
    report = measured(FakeDriver(seconds=lambda name, call: {"plain": 2.0, "K3": 1.0, "K2": 0.8}[name]), ks=(3, 2))
    assert report.best_k == 2
    assert report.speedup_by_concurrency()[1] == 2.5
    assert report.speedup_by_concurrency(3)[1] == 2.0
    shown = io.StringIO()
    report.render(Console(file=shown, width=200))
    assert "best K over these loads: 2" in shown.getvalue()
    assert "2.50 x" in shown.getvalue()


def test_without_k_it_is_what_the_drafter_was_trained_for(measured):
    assert {row.k for row in measured(FakeDriver(), ks=()).rows} == {tiny.BLOCK - 1}


def rows(**speedups):
    """Rows as they are; only what decides differs."""
    base = {"k": 3, "plain_tps": 1, "spec_tps": 1, "speedup_ci95": None, "predicted_speedup": 1, "cycle": None}
    base |= {"emitted_per_round": 2, "accepted_by_slot": (), "plain_latency": None, "spec_latency": None}
    from dflash_plugins.bench_report import BenchRow

    return [BenchRow.model_construct(**base, concurrency=int(c[1:]), speedup=s) for c, s in speedups.items()]


@pytest.mark.parametrize(
    ("speedups", "found", "words"),
    [
        ({"c1": 1.5, "c4": 0.5}, 2.0, "break-even at 2.0"),
        ({"c8": 0.5, "c4": 1.0, "c1": 2.0}, 4.0, "break-even at 4.0"),
        ({"c1": 1.5, "c4": 1.2}, None, "pays at every measured load, up to 4"),
        ({"c1": 0.9, "c4": 0.5}, None, "does not pay at 1 at once"),
        ({"c1": 0.9, "c4": 1.5}, None, "yet does at more"),
        ({"c2": 1.5}, None, "up to 2"),
    ],
)
def test_break_even(speedups, found, words):
    made = rows(**speedups)
    assert break_even(made, 3) == (None if found is None else pytest.approx(found))
    assert words in break_even_words(made, 3, break_even(made, 3))
    assert pays_best(made) == 3


def test_percentiles_and_gaps():
    assert percentiles(range(1, 101)).model_dump() == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([4.0]).p99 == 4.0
    one = Completion(ids=(1, 2, 3, 4), text=None, finish_reason=None, emitted=(2, 1), arrivals=(1.0, 1.5, 2.5))
    assert list(gaps(one)) == [(0.5, 2), (1.0, 1)]
    assert list(gaps(one.model_copy(update={"arrivals": None, "emitted": None}))) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [({"ks": (3, 3)}, "k 3, 3"), ({"concurrency": (0,)}, "concurrency 0"), ({"runs": 0}, "runs 0")],
)
def test_what_is_refused_before_an_engine_starts(measured, options, match):
    driver = FakeDriver()
    with pytest.raises(BadInput, match=match):
        measured(driver, **options)
    assert driver.started == []


def test_other_flags_are_refused(measured):
    with pytest.raises(BadInput, match="differs in 1 flags besides speculation: block_size"):
        measured(FakeDriver(flags={"block_size": 16}))


def test_no_round_is_nothing_to_measure(measured):
    with pytest.raises(BadInput, match="no speculative round"):
        measured(FakeDriver(rounds=0))


# -- the commands


@pytest.fixture
def command(monkeypatch, pair, prompts):
    monkeypatch.setattr("dflash_plugins.driver.find_driver", lambda name: FakeDriver(tells_times=True))
    return ["bench", "--engine", "vllm", "--target", str(pair[0]), "--draft", str(pair[1]), "--prompts", str(prompts)]


def test_the_command_and_the_report_of_what_it_printed(command, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--k", "3, 2", "--concurrency", "1,2", "--max-tokens", "5", "--runs", "2", "--json"]
    assert cli.main([*command, *options]) == 0
    result = tmp_path / "run <1>.json"
    result.write_text(capsys.readouterr().out)
    page, picture = tmp_path / "page.html", tmp_path / "plots.png"
    assert cli.main(["report", str(result), "--html", str(page), "--png", str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": 1, "html": str(page), "png": str(picture)}
    text = page.read_text()
    assert "run &lt;1&gt;" in text
    assert "<svg" in text
    assert "http-equiv" not in text
    assert "src=" not in text
    assert text.count("<tr>") == 5
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", [("--k", "three"), ("--concurrency", "1,,2"), ("--k", "-1")])
def test_no_number_is_exit_2(command, capsys, option):
    assert cli.main([*command, *option]) == 2
    assert option[1] in capsys.readouterr().err


def test_every_unusable_result_is_named(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.json").write_text("{}")
    assert cli.main(["report", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    shown = capsys.readouterr().err
    assert "a.json: is not what bench --json prints" in shown
    assert "b.json: No such file" in shown


def test_without_matplotlib_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["report", "x.json"]) == 2
    assert "dflash-plugins[bench]" in capsys.readouterr().err


def test_reading_a_report_loads_neither_torch_nor_plots(python):
    script = "import sys, dflash_plugins.page, dflash_plugins.bench; print({'torch', 'matplotlib'} & set(sys.modules))"
    assert python("-c", script).stdout == "set()\n"
