"""What the engines' workers share, on a toy engine; and what SGLang's makes of that engine's answers, by hand."""

import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dflash_plugins.driver import Counters, EngineConfig, EngineError, Sampling, WorkerProcess
from dflash_plugins.worker import describe, encode_messages
from sglang_ext.worker import Head, counters_of, engine_arguments, sampling_parameters
from vllm_ext.stopwatch import Stopwatch, runner_of
from vllm_ext.worker import joined

TOY = """
import multiprocessing, subprocess, sys
from dflash_plugins.driver import Completion, Counters, Generated, Hello
from dflash_plugins.worker import run

def child():
    print('{"error": "of a child"}', flush=True)

class Toy:
    def __init__(self, config, channel):
        print('{"error": "of the engine"}', flush=True)
        subprocess.run([sys.executable, "-c", "print(1)"], check=True)
        spawned = multiprocessing.get_context("spawn").Process(target=child)
        spawned.start()
        spawned.join()
        assert spawned.exitcode == 0
        if config.target == "bad":
            raise ValueError("outer") from KeyError("the  reason")
        self.channel = channel

    def hello(self):
        return Hello(engine="toy", version="1", flags={})

    def encode(self, texts):
        if texts == ["bad"]:
            raise ValueError("no such text")
        return [[len(text)] for text in texts]

    def generate(self, prompts, sampling):
        self.channel.send({"progress": [1, 1]})
        completion = Completion(ids=(1,) * sampling.max_tokens, text=None, finish_reason="length")
        return Generated(completions=(completion,), seconds=1.0, counters=Counters(rounds=2))

if __name__ == "__main__":
    run(Toy)
"""


def start(folder, target="t"):
    script = folder / "toy.py"
    script.write_text(TOY)
    return WorkerProcess([sys.executable, str(script)], EngineConfig(target=target), os.environ)


def test_only_answers_travel_whatever_the_engine_and_its_children_print(tmp_path):
    seen = []
    with start(tmp_path) as worker:
        assert worker.hello.engine == "toy"
        assert worker.encode(["abc"]) == [[3]]
        with pytest.raises(EngineError, match="ValueError: no such text"):
            worker.encode(["bad"])
        generated = worker.generate([[1]], Sampling(max_tokens=3), lambda done, total: seen.append((done, total)))
    assert (generated.tokens, generated.counters.rounds, seen) == (3, 2, [(1, 1)])


def test_an_engine_that_cannot_start_says_the_innermost_reason(tmp_path):
    with pytest.raises(EngineError, match="KeyError: 'the reason'"):
        start(tmp_path, "bad")


def test_a_reason_is_one_line():
    assert describe(ValueError("a\n  b")) == "ValueError: a b"


class Tokenizer:
    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"<{messages[0]['role']}>{messages[0]['content']}"


def test_texts_are_one_user_message_where_the_target_has_a_template():
    assert encode_messages(Tokenizer(), ["a"]) == [[0, 97]]
    assert encode_messages(Tokenizer("{}"), ["a"]) == [[ord(c) for c in "<user>a"]]
    with pytest.raises(ValueError, match="no tokenizer"):
        encode_messages(None, ["a"])


def test_counters_of_sglang_are_those_of_the_core():
    """Five rounds of K = 4 that accepted 0, 2, 1, 2 and 0: the engine's histogram ends at the largest seen."""
    meta = {
        "spec_verify_ct": 5,
        "spec_num_proposed_drafts": 20,
        "spec_num_correct_drafts": 5,
        "spec_correct_drafts_histogram": [2, 1, 2],
    }
    expected = Counters(rounds=5, proposed=20, accepted=5, accepted_by_slot=(3, 2, 0, 0))
    assert counters_of(meta, 4) == expected
    assert counters_of({}, 4) == Counters()
    assert counters_of({}, None) == Counters()


def test_steps_of_vllm_are_rounds_with_their_times_but_for_those_that_gained_nothing():
    pieces = [
        SimpleNamespace(token_ids=ids, text=str(len(ids)), finish_reason=None) for ids in ([], [5], [6, 7], [], [8])
    ]
    found = joined(pieces, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert (found.ids, found.emitted, found.arrivals) == ((5, 6, 7, 8), (2, 1), (0.2, 0.3, 0.5))


class Model(torch.nn.Module):
    def compute_logits(self, hidden):
        return hidden + 1


class Runner:
    def __init__(self):
        self.model = Model()

    def _model_forward(self, x):
        return self.model.compute_logits(x)

    def propose_draft_token_ids(self, x):
        time.sleep(0.01)
        return -x


def test_a_watched_runner_does_the_same_and_is_left_as_it_was():
    runner, watch = Runner(), Stopwatch()
    with watch.on(runner):
        assert (runner._model_forward(3), runner.propose_draft_token_ids(2)) == (4, -2)
        assert watch.draft >= 0.01
        assert watch.verify > 0
        watch.restart()
        assert (watch.draft, watch.verify) == (0, 0)
    assert list(vars(runner)) == ["model"]
    assert "compute_logits" not in vars(runner.model)
    runner.propose_draft_token_ids(2)
    assert watch.draft == 0


def test_only_a_v1_runner_on_a_cpu_is_watched():
    runner, llm = Runner(), SimpleNamespace()
    inner = llm
    for name in ("llm_engine", "engine_core", "engine_core", "model_executor", "driver_worker", "worker"):
        setattr(inner, name, SimpleNamespace())
        inner = getattr(inner, name)
    inner.model_runner = runner
    assert runner_of(llm, on_cpu=True) is runner
    assert runner_of(llm, on_cpu=False) is None
    inner.model_runner = SimpleNamespace(model=Model())  # V2
    assert runner_of(llm, on_cpu=True) is None
    assert runner_of(SimpleNamespace(), on_cpu=True) is None


def test_arguments_of_sglang():
    config = EngineConfig(target="t", draft="d", k=7, max_num_seqs=4, max_model_len=256, extra={"watchdog_timeout": 9})
    arguments = engine_arguments(config, on_cpu=True)
    assert arguments["speculative_num_draft_tokens"] == 8  # SGLang counts the anchor
    assert (arguments["max_total_tokens"], arguments["max_running_requests"]) == (1024, 4)
    assert arguments["watchdog_timeout"] == 9
    plain = engine_arguments(config.plain(), on_cpu=True)
    assert not [name for name in plain if name.startswith("speculative")]
    on_gpu = engine_arguments(config, on_cpu=False)
    assert "attention_backend" not in on_gpu
    assert "max_total_tokens" not in on_gpu


def test_sampling_of_sglang():
    assert sampling_parameters(Sampling(max_tokens=5))["top_k"] == -1  # all of them
    assert sampling_parameters(Sampling(top_k=3))["top_k"] == 3
    with pytest.raises(ValueError, match="the engine's seed"):
        sampling_parameters(Sampling(seed=1))


@pytest.fixture
def head(tmp_path):
    """Three tokens: logits of hidden (3, 4) are 3, 8 and 25."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])
    save_file({"model.embed_tokens.weight": rows, "other": torch.zeros(1)}, tmp_path / "model.safetensors")
    return Head(tmp_path)


def test_logits_of_sglang_are_its_log_probabilities_and_what_the_head_says(head):
    normaliser = 25.000000041
    found = head.logits([(1, 8 - normaliser), (2, 25 - normaliser)], [3.0, 4.0])
    assert [i for i, _ in found] == [2, 1]
    assert [value for _, value in found] == pytest.approx([25, 8])
    with pytest.raises(ValueError, match="cannot be had"):
        head.logits([(1, 9.1 - normaliser), (2, 25 - normaliser)], [3.0, 4.0])


def test_a_head_that_cannot_be_found_is_said(tmp_path):
    save_file(
        {"a.embed_tokens.weight": torch.zeros(1, 1), "b.embed_tokens.weight": torch.zeros(1, 1)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="neither lm_head"):
        Head(tmp_path)
