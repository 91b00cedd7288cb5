"""The driver with a real vLLM and a tiny random pair: ids, logits, counters, failures, and ``prove`` on top of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from dflash_plugins import prove
from dflash_plugins.driver import EngineConfig, EngineError, Sampling, require_comparable
from dflash_plugins.errors import BadInput
from vllm_ext.driver import VllmDriver, worker_environment

ROOT = Path(__file__).parents[2]
IDS = [[3, 4, 5], [6, 7, 8, 9]]

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    pytest.importorskip("vllm")
    from conftest import visible_plugin

    with visible_plugin(tmp_path_factory.mktemp("installed")):
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    return tiny.write_target(base / "target"), tiny.write_drafter(base / "draft", tiny.raw_config())


@pytest.fixture(scope="module")
def extra():
    return {"skip_tokenizer_init": True}


def test_one_engine_beside_another(pair, extra):
    target, draft = map(str, pair)
    config = EngineConfig(target=target, draft=draft, k=7, max_num_seqs=2, max_model_len=256, extra=extra)
    driver = VllmDriver()
    how = Sampling(max_tokens=12, ignore_eos=True)
    with driver.start(config.plain()) as plain, driver.start(config) as speculative:
        require_comparable(plain.hello, speculative.hello)
        texts = plain.generate(IDS, Sampling(max_tokens=12, ignore_eos=True, logits=3))
        seen = []
        drafted = speculative.generate(IDS, how, lambda done, total: seen.append((done, total)))
        assert [c.ids for c in drafted.completions] == [c.ids for c in texts.completions]
        assert seen[-1] == (2, 2)
        # Raw logits, best first, the greedy choice on top.
        row = texts.completions[0].logits[4]
        assert row[0][0] == texts.completions[0].ids[4]
        assert row[0][1] >= row[1][1] >= row[2][1]
        assert texts.counters.rounds == 0
        counters = drafted.counters
        assert counters.proposed >= counters.rounds > 0
        assert sum(counters.accepted_by_slot) == counters.accepted
        # Per request: one token from the prompt, then rounds; what a last round had too much is cut.
        assert counters.rounds + counters.accepted + 2 >= drafted.tokens == 24
        # Counters are those of this batch, not of the engine's life.
        again = speculative.generate(IDS[:1], how)
        assert again.counters.rounds < counters.rounds
        with pytest.raises(EngineError, match="maximum"):
            plain.generate([[1] * 300], how)
        assert plain.generate(IDS[:1], how).completions[0].ids == texts.completions[0].ids


def test_a_configuration_that_vllm_refuses_is_one_clear_message(pair, extra):
    with pytest.raises(EngineError, match="no_such_dtype"):
        VllmDriver().start(EngineConfig(target=str(pair[0]), dtype="no_such_dtype", extra=extra))


def test_flags_that_the_command_decides_are_refused():
    config = EngineConfig(target="t", extra={"speculative_config": {}, "seed": 1, "max_num_batched_tokens": 64})
    with pytest.raises(BadInput, match=r"use its own options: seed, speculative_config$"):
        VllmDriver().start(config)


def test_what_the_user_has_set_wins_but_for_two_musts():
    given = {"OMP_NUM_THREADS": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OTHER": "x"}
    environment = worker_environment(given)
    assert (environment["OMP_NUM_THREADS"], environment["OTHER"]) == ("3", "x")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_a_parent_that_is_killed_leaves_no_engine(pair, extra, tmp_path):
    script = f"""
import json, os, signal
from dflash_plugins.driver import EngineConfig
from vllm_ext.driver import VllmDriver
worker = VllmDriver().start(EngineConfig(target={str(pair[0])!r}, max_model_len=256, extra={extra!r}))
print(worker._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    pid = int(done.stdout)
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            return
        subprocess.run(["sleep", "0.1"])
    pytest.fail(f"process {pid} still runs")


def test_prove_on_a_real_engine(pair, extra, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in IDS))
    report = prove.run("vllm", *pair, prompts=prompts, max_tokens=24, ignore_eos=True, extra=extra, driver=VllmDriver())
    assert report.lossless
    assert (report.prompts, report.tokens) == (2, 48)
    assert 1 <= report.emitted_per_round < 8


@pytest.mark.parametrize("mended", [True, False])
def test_the_distribution_test_sees_the_cpu_bug_and_passes_when_it_is_mended(
    pair, extra, tmp_path, mended, monkeypatch
):
    """Bug B of the engine: temperature, top-p and top-k of the verify rows are memory nobody has written."""
    if not mended:
        monkeypatch.setenv("DFLASH_PLUGINS_NO_MEND_EXPAND_KERNEL", "1")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in IDS))
    report = prove.run("vllm", *pair, prompts=prompts, temperature=0.7, samples=400, extra=extra, driver=VllmDriver())
    assert report.lossless is mended, report.test
