"""An engine that needs no model: a driver whose sessions answer from a rule, for the commands on top of drivers."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_plugins.driver import Completion, Counters, Generated, Hello

VOCAB = 64
PLAIN_SECONDS = 2.0


def next_token(ids):
    """The fake target: any rule that depends on the whole prefix."""
    return (3 * sum(ids) + 7 * len(ids)) % VOCAB


def best(token, gap=1.0, level=16.0):
    """Logits of a row: ``token`` leads the token after it by ``gap``, all others lie far below."""
    return ((token, level), ((token + 1) % VOCAB, level - gap), ((token + 2) % VOCAB, level - 9.0))


@dataclass
class FakeSession:
    """``deviate(prompt, position)`` says whether the speculative engine takes the second-best token there."""

    driver: FakeDriver
    config: object
    hello: Hello
    closed: bool = False

    def encode(self, texts):
        return [[len(text), *text.encode()[:3]] for text in texts]

    def generate(self, prompts, sampling, progress=None):
        assert not self.closed
        self.driver.calls.append((self.name, [list(p) for p in prompts], sampling))
        completions = tuple(self._complete(number, list(p), sampling) for number, p in enumerate(prompts))
        if progress:
            progress(len(prompts), len(prompts))
        rounds = 0 if self.config.draft is None else self.driver.rounds
        counters = Counters(rounds=rounds, proposed=3 * rounds, accepted=rounds, accepted_by_slot=(rounds, 0, 0))
        seconds = self.driver.seconds(self.name, len(self.driver.calls))
        counters = counters if rounds else Counters()
        return Generated(completions=completions, seconds=seconds, counters=counters, parts=self.driver.parts)

    @property
    def name(self):
        return "plain" if self.config.draft is None else f"K{self.config.k}"

    def _complete(self, number, ids, sampling):
        start, logits = len(ids), []
        for position in range(sampling.max_tokens):
            token = self._choose(number, ids, position, sampling)
            logits.append(best(next_token(ids), self.driver.gap, self.driver.level))
            ids.append(token)
        kept = ids[start:][: self.driver.cut if self.config.draft else None]
        return Completion(
            ids=tuple(kept),
            text="text",
            finish_reason="length",
            logits=tuple(logits) if sampling.logits else None,
            **self._times(len(kept), sampling),
        )

    def _times(self, tokens, sampling):
        """A step takes a quarter of a second plainly, and half of one for two tokens with a drafter."""
        if not (sampling.times and self.driver.tells_times):
            return {}
        each = 1 if self.config.draft is None else 2
        emitted = [min(each, tokens - 1 - start) for start in range(0, tokens - 1, each)]
        return {"emitted": tuple(emitted), "arrivals": tuple(1 + 0.25 * each * n for n in range(len(emitted) + 1))}

    def _choose(self, number, ids, position, sampling):
        if sampling.temperature:
            return self.driver.sample(self.name, position)
        deviates = self.config.draft is not None and self.driver.deviate(number, position)
        return (next_token(ids) + deviates) % VOCAB

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@dataclass
class FakeDriver:
    name: str = "vllm"
    deviate: object = staticmethod(lambda prompt, position: False)
    sample: object = None
    seconds: object = staticmethod(lambda name, call: PLAIN_SECONDS if name == "plain" else 1.0)
    gap: float = 1.0
    level: float = 16.0
    rounds: int = 10
    cut: int | None = None
    tells_times: bool = False
    parts: tuple | None = None
    flags: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    started: list = field(default_factory=list)

    def missing(self):
        return None

    def start(self, config):
        flags = {"max_model_len": config.max_model_len} | (self.flags if config.draft else {})
        session = FakeSession(self, config, Hello(engine=self.name, version="0", flags=flags))
        self.started.append(session)
        return session
