"""What clients ask of every engine's server with D-Loop and its selector, beside the same target served alone.

A test module of an engine imports all of this and brings the fixture ``servers``: the plain one and the drafting one,
which conftest gives as ``plain`` and ``loop``.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import trained

K = trained.BLOCK - 1
# What the tiny target finishes in its own words, and what it has never seen.
PROMPTS = [*trained.prompts(5, seed=4, lengths=(9, 12, 6, 20, 15)), "ba da ka", "{"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Los Angeles", "New York"]},
        "counts": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 4},
        "open": {"type": "boolean"},
    },
    "required": ["name", "counts", "open"],
    "additionalProperties": False,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def both(servers, **body):
    """The first choice of either server, and that its text is the same."""
    alone, drafted = (server.complete(**body) for server in servers)
    assert drafted["text"] == alone["text"]
    return alone, drafted


def test_every_client_of_a_busy_server_gets_the_plain_text(servers):
    def texts(server):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda p: server.complete(prompt=p, max_tokens=48)["text"], PROMPTS))

    alone, drafted = map(texts, servers)
    assert drafted == alone
    assert len(set(alone)) == len(PROMPTS)


def test_streamed_chunks_join_to_the_plain_text(plain, loop):
    body = {"prompt": PROMPTS[0], "max_tokens": 60, "ignore_eos": True}
    with loop.stream(**body, stream_options={"include_usage": True}) as chunks:
        *chunks, last = chunks
    assert "".join(one["choices"][0]["text"] for one in chunks) == plain.complete(**body)["text"]
    assert last["usage"]["completion_tokens"] == 60
    # More tokens than chunks: a chunk is what a round emitted.
    assert 5 < len(chunks) < 45


def test_a_chat_is_answered_and_streamed_as_plainly(plain, loop):
    body = {"path": "chat/completions", "messages": [{"role": "user", "content": "ba da ka"}], "max_tokens": 30}
    answer = plain.post(**body).json()["choices"][0]["message"]["content"]
    assert answer
    assert loop.post(**body).json()["choices"][0]["message"]["content"] == answer
    with loop.stream(**body) as chunks:
        assert "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks) == answer


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_string_ends_the_text_inside_a_block(servers, place):
    """It begins inside one word and ends inside the next, at all places of a block in turn."""
    body = {"prompt": PROMPTS[1], "max_tokens": 80, "ignore_eos": True}
    whole = servers[0].complete(**body)["text"]
    spaces = [i for i, letter in enumerate(whole) if letter == " "]
    stop = whole[spaces[place] - 1 : spaces[place] + 2]
    cut = whole[: whole.index(stop)]
    for more, text in (({}, cut), (servers[0].keep_stop, cut + stop)):
        alone, drafted = both(servers, **body, stop=["~", stop], **more)
        assert drafted["text"] == text
        for one, server in zip((alone, drafted), servers, strict=True):
            assert (one["finish_reason"], one[server.stop_found]) == ("stop", stop)


def expect_place(drafted):
    """That a structured answer is whole and as ``SCHEMA`` wants it."""
    made = json.loads(drafted["text"])
    assert drafted["finish_reason"] == "stop"
    assert set(made) == set(SCHEMA["required"])
    assert made["name"] in SCHEMA["properties"]["name"]["enum"]
    assert 2 <= len(made["counts"]) <= 4
    assert set(made["counts"]) <= {1, 22, 333}
    assert isinstance(made["open"], bool)
