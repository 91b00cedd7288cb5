"""An audited vLLM on a CPU with tiny trained pairs: nothing to say of it as it is, and every planted fault by name."""

import json
import re
from pathlib import Path

import pytest
import trained

from dflash_plugins import audit
from dflash_plugins.switches import AUDIT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.heavy]

# K, K + 1, K + 2 and others; one that comes in chunks, and one token, which the engine verifies with placeholders.
LENGTHS = (7, 8, 9, 16, 3, 1, 70, 40)
RUNS = {
    "dflash": {},
    "dflash2": {"draft_sample_method": "probabilistic"},
    "dloop": {"async_scheduling": True},
    "dloop-selector": {"async_scheduling": True, "draft_sample_method": "probabilistic"},
}
# The interpreter under the V2 runner is slow: fewer rounds there, and every method sees the other half of the options.
RUNS_V2 = {
    "dflash": {"async_scheduling": True},
    "dflash2": {"async_scheduling": True, "draft_sample_method": "probabilistic"},
    "dloop": {},
    "dloop-selector": {"draft_sample_method": "probabilistic"},
}
V1, V2 = "audit_jobs.py", "audit_v2_jobs.py"
EVERY = [
    pytest.param(script, method, options, id=f"{runner_name}-{method}")
    for runner_name, script, runs in (("v1", V1, RUNS), ("v2", V2, RUNS_V2))
    for method, options in runs.items()
]


@pytest.fixture(scope="module")
def audited(run_job, tmp_path_factory):
    """``audited(job, method)``: the job's answer, the counts and the mismatches; every engine runs once."""
    folder, done = tmp_path_factory.mktemp("audits"), {}

    def run(name, method, script=V1, lengths=LENGTHS, **options):
        if (name, method, script) not in done:
            target, drafter = trained.pair(method)
            file = folder / f"{name}-{method}-{script}.jsonl"
            prompts = trained.prompts(len(lengths), seed=5, lengths=lengths)
            answer = run_job(
                name, script=script, environment={AUDIT: str(file)},
                target=target, drafter=drafter, prompts=prompts, vocab=trained.VOCAB, **options,
            )  # fmt: skip
            done[name, method, script] = (answer, *audit.read(file))
        return done[name, method, script]

    return run


@pytest.mark.parametrize(("script", "method", "options"), EVERY)
def test_nothing_is_said_of_any_method_on_either_runner(audited, script, method, options):
    """Prompt chunks, prefix hits, cut drafts, aborts; greedy and sampled requests in one batch."""
    answer, counts, mismatches = audited("every", method, script, **options)
    assert mismatches == []
    assert counts.mismatches == {}
    assert counts.verified > 100
    assert min(counts.chunks, counts.accepted) > 0
    assert counts.proposed < 7 * counts.verified  # some drafts were cut
    assert counts.unaudited == 0
    assert answer["async"] == options.get("async_scheduling", False)
    assert answer["hits"] > 0


@pytest.mark.parametrize(("script", "method", "options"), EVERY)
def test_the_audited_engine_answers_as_plain_decoding_does(audited, script, method, options):
    answer, *_ = audited("every", method, script, **options)
    assert all(texts == answer["truth"] for texts in answer["texts"].values())


@pytest.mark.parametrize("script", [V1, V2])
def test_some_requests_were_preempted_and_some_rounds_filled_up(audited, script):
    seen = [audited("every", p.values[1], script, **p.values[2]) for p in EVERY if p.values[0] == script]
    assert sum(answer["preempted"] for answer, *_ in seen) > 0
    assert sum(counts.padded for _, counts, _ in seen) > 0


def test_the_counts_are_those_of_the_engine(audited):
    """Without async scheduling; with it the engine does not count what a request accepts after it has been given up."""
    answer, counts, _ = audited("every", "dflash")
    assert counts.accepted == answer["accepted"]
    assert counts.requests <= answer["requests"]  # some are given up before their first step


FAULTS = {
    "emitted": {"emitted"},
    "accepted": {"accepted", "emitted"},
    "context_length": {"drafter_context"},
    "context_rows": {"rows_kept", "context_positions", "drafter_context", "block_positions"},
    "anchor": {"block_ids"},
    "mask_rows": {"block_ids"},
}


# Four prompts are enough for the interpreter.
PLANTED = {V1: LENGTHS, V2: (7, 9, 16, 20)}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("script", PLANTED)
def test_a_planted_fault_is_counted_and_written_down_with_its_request(audited, script, fault):
    answer, *_ = audited("planted", "dflash", script, PLANTED[script])
    assert answer["none"]["lines"] == []
    planted, lines = answer[fault]["planted"], answer[fault]["lines"]
    assert planted > 0
    for kind in FAULTS[fault]:
        named = [line for line in lines if line["what"]["kind"] == kind]
        assert len(named) == planted
        assert all(line["expected"] != line["got"] and line["request"] and line["round"] for line in named)
    assert {line["what"]["kind"] for line in lines} == FAULTS[fault]


@pytest.mark.parametrize("script", PLANTED)
def test_planted_faults_are_errors_in_the_log(audited, script):
    answer, counts, mismatches = audited("planted", "dflash", script, PLANTED[script])
    said = re.findall(r"ERROR.*dflash-plugins: audit, request (\S+), round \d+, (\w+): expected", answer["log"])
    assert sorted(said) == sorted((line["request"], line["what"]["kind"]) for line in mismatches)
    assert sum(counts.mismatches.values()) == len(mismatches)


def test_what_cannot_be_audited_does_not_start(run_job, tmp_path):
    """A sampler that takes other arguments stands for an engine that has changed."""
    file = tmp_path / "audit.jsonl"
    target, drafter = trained.pair("dflash")
    answer = run_job("changed", script=V1, environment={AUDIT: str(file)}, target=target, drafter=drafter)
    assert "rejection_sample takes ('whatever',)" in answer["said"]
    assert "rejection_sample takes ('whatever',)" in json.loads(Path(file).read_text())["refused"]
