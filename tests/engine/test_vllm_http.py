"""``vllm serve`` with D-Loop and its selector, over HTTP, beside the same target served alone: what a client sees."""

import time
from contextlib import ExitStack

import pytest
import trained
from http_cases import (  # noqa: F401 - its tests are run here
    CHAT_TEMPLATE,
    PROMPTS,
    SCHEMA,
    K,
    both,
    expect_place,
    test_a_chat_is_answered_and_streamed_as_plainly,
    test_a_stop_string_ends_the_text_inside_a_block,
    test_every_client_of_a_busy_server_gets_the_plain_text,
    test_streamed_chunks_join_to_the_plain_text,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.heavy]

EAGER = ("--enforce-eager",)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """``start(method, *options)`` starts a server beside this one and does not wait for it; all end with the module."""
    pytest.importorskip("vllm")
    http_server = pytest.importorskip("http_server")
    from conftest import write_distribution

    base = tmp_path_factory.mktemp("http")
    site = write_distribution(base / "site")
    template = base / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    with ExitStack() as stack:

        def start(method, *options):
            target, drafter = trained.pair(method or "dflash")
            log = base / f"{method}-{len(list(base.iterdir()))}.log"
            options = ("--chat-template", str(template), *options)
            server = http_server.start(target, method and drafter, log, site=site, k=K, options=options)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="module")
def servers(start):
    """The target alone and with D-Loop and its selector, started together."""
    started = [start(None, *EAGER), start("dloop-selector", *EAGER)]
    return [server.wait() for server in started]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logprobs_are_the_plain_ones(servers, prompt):
    """Within 1e-4 in fp32: a row of another position, or of drafted q, is further away by orders of magnitude."""
    body = {"prompt": prompt, "max_tokens": 48, "logprobs": 5, "return_tokens_as_token_ids": True, "ignore_eos": True}
    alone, drafted = (choice["logprobs"] for choice in both(servers, **body))
    assert len(drafted["tokens"]) == 48
    assert drafted["tokens"] == alone["tokens"]
    assert drafted["token_logprobs"] == pytest.approx(alone["token_logprobs"], abs=1e-4)
    for ours, theirs in zip(drafted["top_logprobs"], alone["top_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)  # a mapping of ids: the same ones


@pytest.mark.parametrize("prompt", ["ba da", "{", PROMPTS[2]])
def test_structured_output_is_valid_and_plain(servers, prompt):
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    _, drafted = both(servers, prompt=prompt, max_tokens=200, response_format=wanted)
    expect_place(drafted)


def test_n_answers_are_different_draws_and_counted(loop):
    answer = loop.post(prompt=PROMPTS[3], n=5, temperature=1, seed=7, max_tokens=20, ignore_eos=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4]
    assert len({choice["text"] for choice in answer["choices"]}) == 5
    assert answer["usage"]["completion_tokens"] == 100


def test_a_client_that_goes_away_leaves_nothing_behind(plain, loop):
    """Nor is its text written to the end, which would count as one more that succeeded."""
    finished = loop.metric("request_success_total")
    with loop.stream(prompt=PROMPTS[4], max_tokens=1900, ignore_eos=True) as chunks:
        for _ in range(2):
            next(chunks)
        assert loop.metric("kv_cache_usage_perc") > 0
    deadline = time.monotonic() + 60
    while loop.metric("num_requests_running") + loop.metric("kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline, "its blocks are still held"
        time.sleep(0.2)
    assert loop.metric("request_success_total") == finished
    body = {"prompt": PROMPTS[4], "max_tokens": 30}
    assert loop.complete(**body)["text"] == plain.complete(**body)["text"]


@pytest.mark.parametrize("parameter", [{"min_p": 0.1}, {"logit_bias": {"5": 3.0}}])
def test_what_the_engine_cannot_verify_is_refused_to_the_client(plain, loop, parameter):
    body = {"prompt": "ba", "max_tokens": 4, "temperature": 1} | parameter
    refused = loop.post(**body)
    assert refused.status_code == 400
    reason = refused.json()["error"]["message"]
    assert next(iter(parameter)) in reason
    assert "not yet supported with speculative decoding" in reason
    assert plain.post(**body).status_code == 200
    assert loop.post(prompt="ba", max_tokens=4).status_code == 200


def test_the_engines_metrics_count_drafts_and_accepted_by_slot(loop):
    def read():
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        totals = [loop.metric(f"spec_decode_{name}_total") for name in names]
        by_slot = "spec_decode_num_accepted_tokens_per_pos_total"
        return totals + [loop.metric(by_slot, position=str(slot)) for slot in range(K)]

    before = read()
    loop.complete(prompt=PROMPTS[0], max_tokens=100, ignore_eos=True)
    drafts, drafted, accepted, *by_slot = (b - a for a, b in zip(before, read(), strict=True))
    assert drafted == K * drafts
    assert accepted == sum(by_slot)
    assert by_slot == sorted(by_slot, reverse=True)
    # 99 tokens come of rounds, each of which emits one more than it accepts; the last may be cut.
    assert 99 <= drafts + accepted <= 99 + K
    assert accepted > drafts


@pytest.mark.parametrize("method", ["dflash", "dloop-selector"])
def test_the_default_torch_compile_drafts_the_same(start, plain, method, tmp_path, monkeypatch, record_property):
    """Nothing compiled before is found: the bodies of target and drafter are compiled while this server starts.

    There are two bodies, without and with convolutions; the latter is that of DFlash 2, too.
    """
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "compiled"))
    server = start(method).wait()
    record_property("seconds until ready", round(server.seconds))
    assert "torch_aot_compile" in server.said()
    body = {"prompt": PROMPTS[0], "max_tokens": 100, "ignore_eos": True}
    assert server.complete(**body)["text"] == plain.complete(**body)["text"]
    assert server.metric("spec_decode_num_accepted_tokens_total") > server.metric("spec_decode_num_drafts_total")
    server.stop()
