"""An audited SGLang on a CPU with tiny trained pairs: nothing to say of it as it is, and planted faults by name."""

import pytest
import trained

from dflash_plugins import audit
from dflash_plugins.switches import AUDIT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RULES = ({}, {"temperature": 1}, {"temperature": 0.8, "top_k": 5}, {"temperature": 1, "top_p": 0.8, "min_p": 0.05})


def requests(greedy):
    """Greedy and sampled side by side, or all of them greedy; some of several chunks."""
    prompts = trained.prompts(20, seed=3, lengths=(7, 8, 9, 1, 2, 30, 70, 100))
    return [
        {"prompt": p, "max_new_tokens": 24} | ({} if greedy else RULES[i % len(RULES)]) for i, p in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def audited(run_sglang, tmp_path_factory):
    """``audited(method, greedy, fault)``: the job's answer, the counts and the mismatches; every engine runs once."""
    folder, done = tmp_path_factory.mktemp("audits"), {}

    def run(method, greedy=False, fault=None):
        key = (method, greedy, fault)
        if key not in done:
            file = folder / f"{len(done)}.jsonl"
            target, drafter = trained.pair(method)
            answer = run_sglang(
                "texts", environment={AUDIT: str(file)} | ({"SGLANG_FAULT": fault} if fault else {}), target=target,
                drafter=drafter, requests=requests(greedy), waves=2, chunked_prefill_size=64,
            )  # fmt: skip
            done[key] = (answer, *audit.read(file))
        return done[key]

    return run


@pytest.mark.parametrize(("method", "greedy"), [*((m, False) for m in trained.METHODS), ("dloop-selector", True)])
def test_nothing_is_said_of_any_method(audited, method, greedy):
    """The engine accepts by itself where all requests of a batch are greedy."""
    answer, counts, mismatches = audited(method, greedy)
    assert mismatches == []
    assert (counts.unaudited, counts.requests) == (0, 40)
    assert min(counts.chunks, counts.accepted, counts.verified) > 0
    assert counts.blocks == counts.verified
    assert counts.proposed == counts.verified * (trained.BLOCK - 1)
    assert counts.emitted >= sum(len(one["ids"]) for wave in answer["waves"] for one in wave)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("one_more_accepted", {"accepted", "emitted"}),
        ("another_bonus", {"emitted"}),
        ("shifted_context", {"context_positions", "context_slots"}),
        ("another_mask", {"block_ids"}),
        ("q_of_other_tokens", {"q"}),
        ("no_rules", {"support"}),
    ],
)
def test_a_planted_fault_is_named(audited, fault, kinds):
    _, counts, mismatches = audited("dloop-selector", "emitted" in kinds, fault)
    assert kinds <= set(counts.mismatches)
    assert {line["what"]["kind"] for line in mismatches} == set(counts.mismatches)
    # A fault is counted where it is, not at every later step: a request is followed on from where the engine errs.
    assert set(counts.mismatches) <= kinds | {"correction"}
