"""``serve --probe``: is what a server drafts accepted? A few prompts over HTTP, and what the server counts itself.

A wrong drafter changes no text, only the speed, so nothing else would say so. Nothing here ends or changes a server.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from dflash_plugins.driver import Counters
from dflash_plugins.matrix.standing import floor as least_floor
from dflash_plugins.suspects import suspects

if TYPE_CHECKING:
    from requests import Session

    from dflash_plugins.report import MatrixSummary, ServeReport

# Of several kinds, since a drafter may be good at one of them.
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 90 miles in 1.5 hours. How far does it travel in 4 hours? Think step by step.",
    "Explain in a few sentences why the sky is blue.",
    "List the days of the week, and then the months of the year.",
)
MAX_TOKENS = 48
ENOUGH_PROPOSALS = 32
"""From so many proposals on, none of which was accepted, chance is no explanation."""
POLL_SECONDS = 0.5
ANSWER_SECONDS = 600
SETTLE_SECONDS = 5.0
PORTS = {"vllm": 8000, "sglang": 30000}
EVERYWHERE = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - what a server may be told; we ask this machine

DETAILS = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
"""What SGLang tells of the rounds of an answer, where it is asked to."""

Say = Callable[[str, bool], None]
"""Called with a text, and whether it is a warning."""


class Unprobed(Exception):
    """The server was not probed; the message says why."""


class ProbeResult(BaseModel):
    """What the probe saw. ``good`` where nothing speaks against the drafter; else why it is not."""

    model_config = ConfigDict(frozen=True)

    verdict: Literal["good", "below floor", "nothing accepted", "no round"]
    counters: Counters
    floor: float | None

    @property
    def good(self) -> bool:
        """Whether there is nothing to warn of."""
        return self.verdict == "good"

    def __str__(self) -> str:
        seen = self.counters
        counted = f"{seen.rounds} rounds, {seen.proposed} proposals, {seen.accepted} accepted"
        if self.verdict == "no round":
            return "not a single round was drafted: the server decodes plainly"
        said = f"{seen.emitted_per_round:.2f} emitted per round ({counted})"
        if self.verdict == "nothing accepted":
            return f"{said}: nothing that was proposed is what the target says"
        floor = "no tested row to compare with" if self.floor is None else f"the tested row's floor is {self.floor:.2f}"
        return f"{said}; {floor}"


@dataclass(frozen=True)
class Address:
    """Where a server is asked."""

    url: str
    port: int
    host: str
    key: str | None = None

    def taken(self) -> bool:
        """Whether something listens there."""
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as one:
            one.settimeout(1)
            return one.connect_ex((self.host, self.port)) == 0


def address_of(engine: str, given: Mapping[str, Any]) -> Address:
    """Where the server of a command line will listen, by its flags; raises ``Unprobed`` where that is no TCP port."""
    if given.get("uds"):
        raise Unprobed(f"it listens on the socket {given['uds']}, and only TCP is asked")
    host = str(given.get("host") or "").strip("[]")
    host = "127.0.0.1" if host in EVERYWHERE else host
    port = int(given.get("port") or PORTS[engine])
    scheme = "https" if given.get("ssl_certfile") else "http"
    key = given.get("api_key") or (os.environ.get("VLLM_API_KEY") if engine == "vllm" else None)
    return Address(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", port, host, key)


def floor_of(matrix: MatrixSummary, k: int | None) -> float | None:
    """Least acceptance floor of a tested pair's rows that were run with ``k`` proposals; None where there are none.

    The probe is greedy, so rows that were count alone where there are some: sampled ones accept less.
    """
    rows = [row for row in matrix.rows if row.launch.k == k] if matrix.status == "tested" else []
    return least_floor([row for row in rows if row.launch.decoding == "greedy"] or rows)


def judge(counters: Counters, floor: float | None) -> ProbeResult:
    """What counters of the probe's rounds say."""
    verdict: Literal["good", "below floor", "nothing accepted", "no round"] = "good"
    if counters.rounds == 0:
        verdict = "no round"
    elif counters.accepted == 0 and counters.proposed >= ENOUGH_PROPOSALS:
        verdict = "nothing accepted"
    elif floor is not None and counters.emitted_per_round < floor:
        verdict = "below floor"
    return ProbeResult(verdict=verdict, counters=counters, floor=floor)


def probing(
    report: ServeReport, given: Mapping[str, Any], say: Say, floor: float | None = None
) -> Callable[[threading.Event], None]:
    """What to do beside a server that is about to start with the flags ``given``; it ends with the event it is given.

    ``floor`` overrides that of the report's matrix rows.
    """
    engine = report.engine.name
    floor = floor_of(report.matrix, report.k) if floor is None else floor
    try:
        address = address_of(engine, given)
        if address.taken():
            raise Unprobed(f"something listens on port {address.port} already")
    except Unprobed as reason:
        say(f"the server is not probed: {reason}", True)
        return lambda over: None

    def beside(over: threading.Event) -> None:
        try:
            result = probe(engine, address, over, k=report.k or 1, floor=floor)
        except Unprobed as reason:
            if not over.is_set():  # a server that ends says itself why
                say(f"the server could not be probed: {reason}", True)
            return
        if result is not None:
            say(str(result) if result.good else _warning(result, suspects(report)), not result.good)

    return beside


def _warning(result: ProbeResult, suspected: Iterable[str]) -> str:
    lines = "\n".join(f"  {number}. {one}" for number, one in enumerate(suspected, 1))
    return f"{result}\nThe text stays that of the target; what suffers is speed. Suspects, worst first:\n{lines}"


def probe(
    engine: str, address: Address, over: threading.Event, *, k: int, floor: float | None = None
) -> ProbeResult | None:
    """Wait until the server answers, ask it, and judge; None where it ended before. Raises ``Unprobed``."""
    import requests

    with requests.Session() as session:
        session.verify = False  # it is ours, on this machine, and may have named itself
        session.trust_env = False  # nor does a proxy lead to it
        if address.key:
            session.headers["Authorization"] = f"Bearer {address.key}"
        if not _ready(session, address, over):
            return None
        try:
            return judge(_measure(session, engine, address.url, k, over), floor)
        except (requests.RequestException, ValueError, KeyError, IndexError, TypeError) as error:
            raise Unprobed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _ready(session: Session, address: Address, over: threading.Event) -> bool:
    import requests

    while not over.is_set():
        try:
            if session.get(f"{address.url}/health", timeout=30).ok:
                return True
        except requests.RequestException:
            pass  # not yet: a server that never comes up is left to say so itself
        over.wait(POLL_SECONDS)
    return False


def _measure(session: Session, engine: str, url: str, k: int, over: threading.Event) -> Counters:
    """What the rounds of the probe's prompts came to, by the answers themselves or else by the server's metrics."""
    model = session.get(f"{url}/v1/models", timeout=ANSWER_SECONDS).json()["data"][0]["id"]
    before = _metrics(session, engine, url)
    answers = [_ask(session, engine, url, model, prompt) for prompt in PROMPTS]
    told = [counters for answer in answers if (counters := counters_of_answer(answer)) is not None]
    if told:
        return sum(told, Counters())
    if before is None:
        raise Unprobed("neither its answers nor its metrics say what was accepted: leave statistics switched on")
    after = before
    for _ in range(int(SETTLE_SECONDS / POLL_SECONDS)):  # counted a little after it was answered
        last, after = after, _metrics(session, engine, url) or after
        if after == last != before or over.wait(POLL_SECONDS):
            break
    rounds, accepted = after.rounds - before.rounds, after.accepted - before.accepted
    if engine == "sglang":  # of whose counters proposals have to be guessed; an answer's first token is of no round
        return Counters(rounds=rounds, proposed=k * rounds, accepted=max(0, accepted - len(PROMPTS)))
    return Counters(rounds=rounds, proposed=after.proposed - before.proposed, accepted=accepted)


def _ask(session: Session, engine: str, url: str, model: str, prompt: str) -> Any:
    """As a chat, which drafters are trained on, else as plain text where the target has no template."""
    body: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}
    if engine == "sglang":
        body["return_spec_tokens_details"] = True
    chat = body | {"messages": [{"role": "user", "content": prompt}]}
    answer = session.post(f"{url}/v1/chat/completions", json=chat, timeout=ANSWER_SECONDS)
    if 400 <= answer.status_code < 500:
        answer = session.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=ANSWER_SECONDS)
    answer.raise_for_status()
    return answer.json()


def counters_of_answer(answer: Any) -> Counters | None:
    """What SGLang tells of an answer's rounds, wherever in it that stands; None where it tells nothing."""
    if isinstance(answer, list):
        return next((found for one in answer if (found := counters_of_answer(one)) is not None), None)
    if not isinstance(answer, dict):
        return None
    if "spec_verify_ct" in answer:
        rounds, proposed, accepted = (int(answer.get(name) or 0) for name in DETAILS)
        return Counters(rounds=rounds, proposed=proposed, accepted=accepted)
    return counters_of_answer(list(answer.values()))


def _metrics(session: Session, engine: str, url: str) -> Counters | None:
    answer = session.get(f"{url}/metrics", timeout=30)
    return counters_of_metrics(engine, answer.text) if answer.ok else None


def counters_of_metrics(engine: str, text: str) -> Counters | None:
    """Running counters of a server out of its Prometheus page; None where it shows none of them.

    SGLang counts rounds and tokens only, so that ``accepted`` still holds one token per answer, and ``proposed`` is 0.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(f"{engine}:").removesuffix("_total")
            sums[name] = sums.get(name, 0) + int(sample.value) if sample.value == sample.value else 0
    if engine == "vllm" and "spec_decode_num_drafts" in sums:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        rounds, proposed, accepted = (sums.get(f"spec_decode_num_{name}", 0) for name in names)
        return Counters(rounds=rounds, proposed=proposed, accepted=accepted)
    if engine == "sglang" and "spec_verify_calls" in sums:
        rounds = sums["spec_verify_calls"]
        return Counters(rounds=rounds, accepted=sums.get("generation_tokens", 0) - rounds)
    return None
