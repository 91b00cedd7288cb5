"""The driver with a real SGLang and tiny trained pairs: ids, logits, counters, failures, and ``prove`` on top of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import trained

from dflash_plugins import prove
from dflash_plugins.driver import EngineConfig, EngineError, Sampling, require_comparable
from dflash_plugins.errors import BadInput, Refused
from sglang_ext.driver import SglangDriver, worker_environment

ROOT = Path(__file__).parents[2]
EXTRA = {"skip_tokenizer_init": True}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.heavy]


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    pytest.importorskip("sglang")
    from conftest import visible_plugin

    with visible_plugin(tmp_path_factory.mktemp("installed")):
        yield


@pytest.fixture(scope="module")
def pair():
    return trained.pair("dflash")


@pytest.fixture(scope="module")
def config(pair):
    target, draft = map(str, pair)
    return EngineConfig(target=target, draft=draft, k=5, max_num_seqs=2, max_model_len=256, extra=EXTRA)


@pytest.fixture(scope="module")
def sessions(config):
    """The plain engine and the drafting one, alive at once."""
    driver = SglangDriver()
    with driver.start(config.plain()) as plain, driver.start(config) as drafting:
        yield plain, drafting


def members(group):
    """Processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for_end(group):
    for _ in range(200):
        if not members(group):
            return
        time.sleep(0.1)
    pytest.fail(f"processes of group {group} still run: {members(group)}")


def test_one_engine_beside_another(sessions):
    plain, drafting = sessions
    require_comparable(plain.hello, drafting.hello)
    assert plain.hello.flags["max_model_len"] == 256
    prompts, how = trained.prompts(3), Sampling(max_tokens=24, ignore_eos=True)
    texts = plain.generate(prompts, how)
    seen = []
    drafted = drafting.generate(prompts, how, lambda done, total: seen.append((done, total)))
    assert [c.ids for c in drafted.completions] == [c.ids for c in texts.completions]
    assert {c.finish_reason for c in texts.completions} == {"length"}
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert texts.counters.rounds == 0
    counters = drafted.counters
    assert counters.proposed == 5 * counters.rounds > 0
    assert len(counters.accepted_by_slot) == 5
    assert sum(counters.accepted_by_slot) == counters.accepted > 0
    # Per request: one token from the prompt, then rounds; what a last round had too much is cut.
    assert counters.rounds + counters.accepted + 3 >= drafted.tokens == 72
    # Counters are those of this batch, not of the engine's life.
    again = drafting.generate(prompts[:1], how)
    assert again.counters.rounds < counters.rounds


def test_logits_are_those_of_the_target(sessions, pair):
    """Held against transformers: raw logits, best first, the greedy choice on top."""
    import torch
    from transformers import AutoModelForCausalLM

    plain, drafting = sessions
    prompt = trained.prompts(1)[0]
    completion = plain.generate([prompt], Sampling(max_tokens=6, ignore_eos=True, logits=4)).completions[0]
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    whole = torch.tensor([[*prompt, *completion.ids]])
    with torch.no_grad():
        expected = model(whole).logits[0, len(prompt) - 1 : -1].topk(4)
    assert len(completion.logits) == 6
    for row, ids, values, chosen in zip(
        completion.logits, expected.indices.tolist(), expected.values.tolist(), completion.ids, strict=True
    ):
        assert [i for i, _ in row] == ids
        assert row[0][0] == chosen
        assert [value for _, value in row] == pytest.approx(values, abs=1e-3)
    with pytest.raises(EngineError, match="without a drafter"):
        drafting.generate([prompt], Sampling(logits=4))


def test_a_request_that_cannot_be_served_is_told_and_the_engine_serves_on(sessions):
    plain, _ = sessions
    how = Sampling(max_tokens=4, ignore_eos=True)
    prompt = trained.prompts(1)[0]
    before = plain.generate([prompt], how)
    with pytest.raises(EngineError, match="context length"):
        plain.generate([prompt, [1] * 300], how)
    with pytest.raises(EngineError, match="no tokenizer"):
        plain.encode(["text"])
    assert plain.generate([prompt], how).completions == before.completions


def test_a_configuration_that_sglang_refuses_is_one_clear_message(pair):
    with pytest.raises(EngineError, match="no_such_dtype"):
        SglangDriver().start(EngineConfig(target=str(pair[0]), dtype="no_such_dtype", extra=EXTRA))


def test_a_pair_that_cannot_be_served_is_refused_with_all_reasons(config, tmp_path):
    """A drafter of another target, and two flags beside it that are not served."""
    other = tiny.write_drafter(tmp_path / "drafter", tiny.raw_config(vocab_size=300, num_target_layers=9))
    bad = config.model_copy(
        update={"draft": str(other), "extra": EXTRA | {"page_size": 16, "speculative_accept_threshold_single": 0.5}}
    )
    with pytest.raises(EngineError) as caught:
        SglangDriver().start(bad)
    for reason in ("vocab", "page_size", "speculative_accept_threshold_single"):
        assert reason in str(caught.value)
    # The commands see the pair before any engine starts.
    with pytest.raises(Refused, match="vocab"):
        prove.run("sglang", bad.target, other, driver=SglangDriver())


def test_flags_that_the_command_decides_are_refused():
    extra = {"random_seed": 1, "speculative_num_draft_tokens": 4, "chunked_prefill_size": 64}
    with pytest.raises(BadInput, match=r"use its own options: random_seed, speculative_num_draft_tokens$"):
        SglangDriver().start(EngineConfig(target="t", extra=extra))


def test_what_the_user_has_set_wins_but_for_a_must():
    environment = worker_environment({"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "", "OTHER": "x"})
    assert (environment["OMP_NUM_THREADS"], environment["OTHER"]) == ("3", "x")
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_an_engine_that_dies_is_told_with_its_last_lines_and_leaves_nothing(config):
    with SglangDriver().start(config.plain()) as session:
        group = session._process.pid
        names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in members(group)}
        [scheduler] = [pid for pid, name in names.items() if "scheduler" in name]
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"ended unexpectedly(.|\n)*last lines:\n(.|\n)*scheduler"):
            session.generate([[3, 4, 5]], Sampling(max_tokens=4))
    wait_for_end(group)


def test_a_parent_that_is_killed_leaves_no_engine(config):
    script = f"""
import os, signal
from dflash_plugins.driver import EngineConfig
from sglang_ext.driver import SglangDriver
worker = SglangDriver().start(EngineConfig.model_validate_json({config.plain().model_dump_json()!r}))
print(worker._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    wait_for_end(int(done.stdout))


@pytest.mark.parametrize("method", ["dflash", "dloop-selector"])
def test_prove_on_a_real_engine(method, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in trained.prompts(4)))
    report = prove.run(
        "sglang", *trained.pair(method), prompts=prompts, max_tokens=24, ignore_eos=True, concurrency=4, extra=EXTRA,
        driver=SglangDriver(),
    )  # fmt: skip
    assert report.lossless
    assert (report.engine, report.prompts, report.tokens) == ("sglang", 4, 96)
    assert 1 < report.emitted_per_round <= 1 + report.k
    assert len(report.accepted_by_slot) == report.k


def test_prove_tests_the_distribution(pair, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in trained.prompts(2)))
    report = prove.run(
        "sglang", *pair, prompts=prompts, temperature=0.8, samples=200, extra=EXTRA, driver=SglangDriver()
    )
    assert report.test is not None
    assert report.lossless, report.test
    assert report.emitted_per_round > 1
