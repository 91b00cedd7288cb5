"""``sglang.launch_server`` with D-Loop and its selector, beside the same target served alone: what a client sees."""

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

MORE = ("--enable-custom-logit-processor", "--enable-return-hidden-states")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The target alone and with D-Loop and its selector, started together."""
    pytest.importorskip("sglang")
    sglang_http = pytest.importorskip("sglang_http")
    from conftest import write_distribution

    base = tmp_path_factory.mktemp("http")
    site = write_distribution(base / "site")
    template = base / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    target, drafter = trained.pair("dloop-selector")
    with ExitStack() as stack:
        started = []
        for name, served in (("plain", None), ("loop", drafter)):
            options = ("--chat-template", str(template), *MORE)
            server = sglang_http.start(target, served, base / f"{name}.log", site=site, k=K, options=options)
            stack.callback(server.stop)
            started.append(server)
        yield [server.wait() for server in started]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_logprobs_are_the_plain_ones(servers, prompt, stream):
    """Within 1e-4 in fp32: a row of another position, or of drafted q, is further away by orders of magnitude."""
    body = {
        "return_logprob": True,
        "top_logprobs_num": 5,
        "sampling_params": {"max_new_tokens": 48, "ignore_eos": True},
    }
    body |= {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    alone = servers[0].native(**body).json()
    drafted = servers[1].native_stream(**body) if stream else servers[1].native(**body).json()
    assert drafted["output_ids"] == alone["output_ids"]
    assert len(drafted["output_ids"]) == 48
    ours, theirs = (one["meta_info"]["output_token_logprobs"] for one in (drafted, alone))
    assert [token for _, token, _ in ours] == drafted["output_ids"]
    assert [value for value, _, _ in ours] == pytest.approx([value for value, _, _ in theirs], abs=1e-4)
    ours, theirs = (one["meta_info"]["output_top_logprobs"] for one in (drafted, alone))
    for mine, other in zip(ours, theirs, strict=True):
        values = {token: value for value, token, _ in other}
        assert {token: value for value, token, _ in mine} == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("more", [{}, {"temperature": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", ["ba da", "{", PROMPTS[2]])
def test_structured_output_is_valid_and_plain(servers, prompt, more):
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    alone, drafted = (
        server.complete(prompt=prompt, max_tokens=200, response_format=wanted, **more) for server in servers
    )
    if not more:
        assert drafted["text"] == alone["text"]
    expect_place(drafted)


def test_n_answers_are_different_draws_and_counted(loop):
    answer = loop.post(prompt=PROMPTS[3], n=5, temperature=1, max_tokens=20, ignore_eos=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4]
    assert len({choice["text"] for choice in answer["choices"]}) == 5
    assert answer["usage"]["completion_tokens"] == 100


def test_a_seed_decides_nothing_here_nor_in_plain_sglang(servers):
    """SGLang looks at it only with --enable-deterministic-inference, which is refused beside a drafter."""
    body = {"prompt": PROMPTS[3], "temperature": 1, "seed": 7, "max_tokens": 20, "ignore_eos": True}
    for server in servers:
        assert len({server.complete(**body)["text"] for _ in range(4)}) == 4


def test_a_client_that_goes_away_leaves_nothing_behind(plain, loop):
    """Nor is its text written to the end, which would have taken 1,900 tokens."""
    before = loop.metric("generation_tokens_total")
    with loop.stream(prompt=PROMPTS[4], max_tokens=1900, ignore_eos=True) as chunks:
        for _ in range(2):
            next(chunks)
        assert loop.load()["num_used_tokens"] > 0
    loop.idle()
    assert loop.metric("generation_tokens_total") < before + 1000
    assert loop.flush()
    body = {"prompt": PROMPTS[4], "max_tokens": 30}
    assert loop.complete(**body)["text"] == plain.complete(**body)["text"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"min_p": 0.2, "temperature": 1},
        {"logit_bias": {"5": 3.0}},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.4},
        {"min_tokens": 20},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_rules_of_a_request_are_taken(servers, parameters):
    """Greedy ones change the text as they change the plain one; what they do to a law, test_sglang_sampling shows.

    Not the penalties: with overlap, plain SGLang counts other tokens.
    """
    alone, drafted = (server.complete(prompt=PROMPTS[5], max_tokens=30, **parameters) for server in servers)
    assert drafted["text"]
    if "logit_bias" in parameters or "min_tokens" in parameters:
        assert drafted["text"] == alone["text"]


def test_what_cannot_be_verified_is_refused_to_the_client(loop):
    """On both paths; a processor that would not even load, so that nobody can have looked at it."""
    own = "custom_logit_processor: SGLang hands it all rows of a block at once"
    few = {"max_new_tokens": 4}
    for _ in range(3):
        for answer, reason in (
            (loop.post(prompt="ba", max_tokens=4, custom_logit_processor="{}"), own),
            (loop.native(text="ba", sampling_params=few, custom_logit_processor="{}"), own),
            (loop.native(text="ba", sampling_params=few, return_sampling_mask=True), "return_sampling_mask: "),
        ):
            assert answer.status_code == 400
            assert reason in answer.text
    loop.idle()
    assert loop.complete(prompt="ba", max_tokens=4)["text"]


def test_what_the_engine_itself_refuses_it_refuses_still(loop):
    def native(sampling=None, **more):
        return loop.native(text="ba", sampling_params={"max_new_tokens": 4} | (sampling or {}), **more)

    for answer, reason in (
        (native(return_hidden_states=True), "does not support return_hidden_states"),
        (native({"beam_width": 2}), "Beam search is not supported with speculative decoding"),
        (native({"top_p": 2}), "top_p must be in"),
    ):
        assert answer.status_code == 400
        assert reason in answer.text
    loop.idle()
    assert loop.complete(prompt="ba", max_tokens=4)["text"]


def test_the_engine_counts_rounds_and_accepted_proposals(loop):
    before = loop.metric("spec_verify_calls_total")
    about = loop.native(input_ids=PROMPTS[0], sampling_params={"max_new_tokens": 100, "ignore_eos": True}).json()[
        "meta_info"
    ]
    rounds, accepted = about["spec_verify_ct"], about["spec_num_correct_drafts"]
    assert loop.metric("spec_verify_calls_total") - before == rounds
    assert about["spec_num_proposed_drafts"] == K * rounds
    assert about["spec_accept_rate"] == pytest.approx(accepted / (K * rounds))
    histogram = about["spec_correct_drafts_histogram"]
    assert sum(histogram) == rounds
    assert sum(count * times for count, times in enumerate(histogram)) == accepted
    # 99 tokens come of rounds, each of which emits one more than it accepts; the last may be cut.
    assert 99 <= rounds + accepted <= 99 + K
    assert accepted > rounds
    assert loop.load()["speculative"]["accept_length"] > 2
