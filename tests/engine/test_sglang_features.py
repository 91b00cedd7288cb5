"""Features of SGLang beside D-Loop with its selector, one test per line of docs/sglang.md."""

import json
import os
from pathlib import Path

import pytest
import trained

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.heavy]

METHOD = "dloop-selector"


def requests():
    """Some in several chunks of 64, some that begin alike."""
    return [{"prompt": p, "max_new_tokens": 20} for p in trained.prompts(10, seed=8, lengths=(8, 9, 30, 70, 100, 7))]


@pytest.fixture(scope="module")
def alone(run_sglang):
    target, _ = trained.pair(METHOD)
    return [one["ids"] for one in run_sglang("texts", target=target, requests=requests())["waves"][0]]


def drafts(rounds):
    """Block by prompt and place; the engine may run a round more at the end of a text."""
    return {(tuple(one["prompt"]), one["place"], one["anchor"]): one["draft"] for one in rounds}


@pytest.fixture(scope="module")
def beside_nothing(run_sglang):
    target, drafter = trained.pair(METHOD)
    return run_sglang("texts", target=target, drafter=drafter, requests=requests(), watch=True)


def same_where_both(found, others):
    """Blocks of the same places are the same; there are some."""
    shared = found.keys() & others.keys()
    assert len(shared) >= 20
    assert {place: found[place] for place in shared} == {place: others[place] for place in shared}


def test_beside_nothing(beside_nothing, alone):
    assert [one["ids"] for one in beside_nothing["waves"][0]] == alone


@pytest.mark.parametrize("temperature", [0, 1])
def test_tensor_parallel(run_sglang, beside_nothing, alone, temperature, tmp_path):
    """Two processes: ids, and drafts on both ranks, are those of one; what is drawn is drawn once."""
    target, drafter = trained.pair(METHOD)
    file = tmp_path / "rounds.jsonl"
    got = run_sglang(
        "texts", environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_WATCH": str(file)}, target=target,
        drafter=drafter, requests=[one | {"temperature": temperature} for one in requests()], tp_size=2,
    )  # fmt: skip
    first, second = (
        [json.loads(line) for line in Path(f"{file}{suffix}").read_text().splitlines()] for suffix in ("", ".rank1")
    )
    assert len(first) >= 20
    assert [(r["place"], r["draft"], r["accepted"]) for r in first] == [
        (r["place"], r["draft"], r["accepted"]) for r in second
    ]
    if not temperature:
        assert [one["ids"] for one in got["waves"][0]] == alone
        same_where_both(drafts(first), drafts(beside_nothing["rounds"]))


@pytest.mark.parametrize(
    ("options", "texts_only"),
    [
        ({"disable_overlap_schedule": True}, False),
        ({"chunked_prefill_size": 64}, False),
        ({"disable_radix_cache": True}, False),
        ({"chunked_prefill_size": 64, "enable_mixed_chunk": True}, False),
        ({"speculative_draft_window_size": 16}, True),
        ({"max_running_requests": 2}, False),
        ({"max_total_tokens": 300, "max_running_requests": 8}, False),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_works_beside(run_sglang, beside_nothing, alone, options, texts_only):
    target, drafter = trained.pair(METHOD)
    got = run_sglang("texts", target=target, drafter=drafter, requests=requests(), watch=True, **options)
    assert [one["ids"] for one in got["waves"][0]] == alone
    if not texts_only:
        same_where_both(drafts(got["rounds"]), drafts(beside_nothing["rounds"]))


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"pp_size": 2}, ["only supports pp_size == 1"]),
        ({"dp_size": 2}, ["data-parallel"]),
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]}, ["lora"]),
        ({"disaggregation_mode": "prefill"}, ["disaggregation"]),
        ({"speculative_accept_threshold_single": 0.5, "page_size": 16}, ["accept-threshold", "page-size"]),
        ({"enable_deterministic_inference": True}, ["deterministic"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_is_refused_beside(run_sglang, options, reasons):
    target, drafter = trained.pair(METHOD)
    got = run_sglang("texts", check=False, target=target, drafter=drafter, requests=requests(), **options)
    assert got["returncode"] != 0
    assert [reason for reason in reasons if reason not in got["log"]] == []
    assert "Load weight begin" not in got["log"]


def test_switched_off_the_engine_refuses_a_cpu_as_it_always_has(run_sglang):
    target, drafter = trained.pair("dflash")
    got = run_sglang(
        "texts", check=False, environment={"DFLASH_PLUGINS_DISABLE": "1"}, target=target, drafter=drafter,
        requests=requests(),
    )  # fmt: skip
    assert got["returncode"] != 0
    assert "DFLASH speculative decoding is not supported" in got["log"]
    assert os.environ.get("DFLASH_PLUGINS_DISABLE") is None
