"""Two hundred requests of all kinds to a server of SGLang, a quarter of them given up: the pool is as it was before."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import trained

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.heavy]

REQUESTS = 200
POOL = ("max_total_num_tokens", "num_used_tokens", "num_total_tokens", "num_running_reqs", "num_waiting_reqs")
KINDS = [
    {},
    {"temperature": 1},
    {"temperature": 1, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 5, "presence_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {"min_tokens": 4},
]


@pytest.fixture(scope="module", params=trained.METHODS)
def server(request, tmp_path_factory):
    pytest.importorskip("sglang")
    sglang_http = pytest.importorskip("sglang_http")
    from conftest import write_distribution

    base = tmp_path_factory.mktemp("soak")
    target, drafter = trained.pair(request.param)
    server = sglang_http.start(
        target, drafter, base / "server.log", site=write_distribution(base / "site"), k=trained.BLOCK - 1
    )
    yield server.wait()
    server.stop()


def asked(seed=3):
    """(request, chunks after which its client goes away, or None), of mixed lengths and rules."""
    source = random.Random(seed)
    prompts = trained.prompts(50, seed=6, lengths=(6, 24, 60, 120))
    # Prompts come back, so that the prefix cache is used.
    for number in range(REQUESTS):
        request = {"prompt": source.choice(prompts), "max_tokens": source.choice((4, 20, 60, 150))}
        request |= source.choice(KINDS) | {"ignore_eos": number % 3 == 0}
        leaves = number % 4 == 0
        yield (
            request | ({"max_tokens": 300, "ignore_eos": True} if leaves else {}),
            source.randrange(4) if leaves else None,
        )


def ask(server, request, leaves_after):
    """Whether the client stayed to the end."""
    if leaves_after is None:
        assert server.complete(**request)["finish_reason"] in ("stop", "length")
        return True
    with server.stream(**request) as chunks:
        for _ in range(leaves_after):
            next(chunks)
    return False


def test_the_pool_is_as_it_was(server):
    """No slot is used once all is quiet, but for what the prefix cache may let go. A flush would not show that: it
    frees everything, whoever holds it. The engine counts slots and rows of requests itself whenever it is idle.
    """
    first = {"prompt": trained.prompts(1)[0], "max_tokens": 40}
    text = server.complete(**first)["text"]
    before = server.idle()
    with ThreadPoolExecutor(16) as clients:
        stayed = list(clients.map(lambda one: ask(server, *one), asked()))
    assert (len(stayed), stayed.count(False)) == (REQUESTS, REQUESTS // 4)
    after = server.idle()
    assert [after[name] for name in POOL] == [before[name] for name in POOL]
    assert server.complete(**first)["text"] == text
    assert server.flush()
    assert server.complete(**first)["text"] == text
    server.idle()
    assert "leak" not in server.said()
    assert "Traceback" not in server.said()
