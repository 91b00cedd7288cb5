"""The per-request state machine: hand-written lengths, then random lives against an engine made of lists."""

from __future__ import annotations

import pytest
from alignment_machine import AlignmentMachine, steps
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dflash_plugins.alignment import (
    Admission,
    Block,
    Commit,
    Forward,
    Lengths,
    Phase,
    RequestAlignment,
    TransitionError,
)
from dflash_plugins.errors import BadInput


def ready(prompt_length: int, **limits: int) -> RequestAlignment:
    """A request whose prompt was prefilled and whose first token is there."""
    request = RequestAlignment(prompt_length, **{"k": 3, **limits})
    request.admit()
    request.prefill(prompt_length)
    request.commit()
    return request


def play(request: RequestAlignment, ids: list[int], accepted: int, kept: int | None = None) -> Commit:
    """Draft, verify, commit."""
    request.draft(ids)
    request.verify()
    return request.commit(accepted, kept)


def test_three_rounds_by_hand() -> None:
    request = ready(5)
    assert request.lengths == Lengths(committed=6, target_kv=5, drafter_context=5)
    assert request.block() == Block(context=range(5), positions=range(5, 9), proposals=3)
    request.draft([7, 8, 9])
    assert request.verify() == Forward(positions=range(5, 9), proposals=3, samples=True)
    commit = request.commit(accepted=1)
    assert commit == Commit(
        before=Lengths(6, 5, 5),
        after=Lengths(8, 7, 7),
        keep_rows=range(2),
        drop_rows=range(2, 4),
        context_positions=range(5, 7),
    )
    assert commit.snapshot_row == 1
    assert play(request, [7, 8, 9], accepted=0).after == Lengths(9, 8, 8)
    assert play(request, [7, 8, 9], accepted=3).after == Lengths(13, 12, 12)


def test_a_step_without_a_draft_is_plain_decoding_and_the_drafter_keeps_up() -> None:
    request = ready(5)
    assert request.verify() == Forward(range(5, 6), proposals=0, samples=True)
    assert request.commit().after == Lengths(7, 6, 6)


@pytest.mark.parametrize(("kept", "after"), [(1, Lengths(7, 6, 6)), (2, Lengths(8, 7, 7)), (4, Lengths(10, 9, 9))])
def test_tokens_cut_by_eos_are_not_committed(kept: int, after: Lengths) -> None:
    commit = play(ready(5), [7, 8, 9], accepted=3, kept=kept)
    assert commit.after == after
    assert commit.keep_rows == range(kept)
    assert commit.drop_rows == range(kept, 4)


def test_eos_inside_accepted_drafts_as_in_the_fault_list() -> None:
    """F64: emitted [5, 7, EOS, 9] is cut to three; max_tokens 6 with rounds of 4 + 4 ends at six."""
    assert play(ready(4), [5, 7, 2], accepted=3, kept=3).after == Lengths(8, 7, 7)
    request = RequestAlignment(5, k=3, max_length=11)
    request.admit(4)
    assert play(request, [1, 2, 3], accepted=3).after == Lengths(9, 8, 8)
    assert request.block() == Block(context=range(8), positions=range(8, 12), proposals=1)
    assert request.draft([1, 2, 3]) == (1,)
    request.verify()
    assert request.commit(1).after == Lengths(11, 10, 10)
    assert request.remaining == 0
    with pytest.raises(TransitionError, match="all 11 tokens"):
        request.verify()
    assert request.finish() == Lengths(11, 10, 10)


@pytest.mark.parametrize(("accepted", "factor", "offset"), [(0, 0.5, 3.0), (1, 0.25, 10.5), (2, 0.125, 14.25)])
def test_recurrent_state_goes_back_to_the_row_of_the_last_accepted_token(
    accepted: int, factor: float, offset: float
) -> None:
    """F47: s <- 0.5 s + token over anchor 3 and proposals 9, 9."""
    first = 1.75
    request = ready(5)
    request.draft([9, 9])
    request.verify()
    states = [first]
    for token in (3, 9, 9):
        states.append(0.5 * states[-1] + token)
    snapshot_row = request.commit(accepted).snapshot_row
    assert states[snapshot_row + 1] == factor * first + offset


@pytest.mark.parametrize("prompt", [7, 8, 9, 16])
def test_prompts_as_long_as_a_block_are_prefill(prompt: int) -> None:
    """F48: K, K + 1, K + 2, 2 (K + 1) tokens for K = 7; no row of them is a proposal."""
    request = RequestAlignment(prompt, k=7)
    request.admit()
    assert request.phase is Phase.PREFILL
    with pytest.raises(TransitionError, match="cannot verify: the request is prefill"):
        request.verify()
    forward = request.prefill(prompt)
    assert (forward.positions, forward.proposals, forward.anchor_row) == (range(prompt), 0, prompt - 1)
    commit = request.commit()
    assert (commit.keep_rows, commit.drop_rows) == (range(prompt), range(prompt, prompt))
    assert commit.after == Lengths(prompt + 1, prompt, prompt)


def test_chunked_prefill_emits_only_in_its_last_chunk() -> None:
    request = RequestAlignment(10, k=3)
    request.admit()
    assert not request.prefill(6).samples
    with pytest.raises(BadInput, match="1 tokens kept of 0 emitted"):
        request.commit(kept=1)
    commit = request.commit()
    assert (commit.after, commit.context_positions) == (Lengths(10, 6, 6), range(6))
    assert request.prefill(4).samples
    assert request.commit().after == Lengths(11, 10, 10)


def test_a_hit_is_cut_to_what_the_drafter_has() -> None:
    """F41: page 16, prompt 64, 48 tokens cached; reading the drafter's unwritten slots would be NaN."""
    request = RequestAlignment(64, k=7)
    assert request.admit(target_hit=48, drafter_hit=0) == Admission(usable=0, refused=48)
    assert request.prefill(64).positions == range(64)
    request = RequestAlignment(64, k=7)
    assert request.admit(target_hit=48, drafter_hit=32) == Admission(usable=32, refused=16)
    request.prefill(32)
    assert request.commit().context_positions == range(32, 64)
    request.draft([1, 2])
    assert request.preempt() == Lengths(65, 64, 64)
    assert request.admit(target_hit=64, drafter_hit=48) == Admission(usable=48, refused=16)
    assert request.lengths == Lengths(65, 48, 48)


def test_the_same_prompt_twice_uses_the_hit() -> None:
    """F42, with the drafter's context cached in the same blocks."""
    request = RequestAlignment(2000, k=7)
    assert request.admit(target_hit=1984) == Admission(usable=1984, refused=0)
    assert request.prefill(16).positions == range(1984, 2000)


def test_a_full_hit_still_runs_the_newest_token() -> None:
    request = RequestAlignment(64, k=7)
    assert request.admit(target_hit=64) == Admission(usable=63, refused=1)
    assert request.prefill(1).samples


def test_a_hit_ends_where_a_recurrent_state_was_kept() -> None:
    request = RequestAlignment(64, k=7)
    assert request.admit(target_hit=48, states={0, 16, 40, 64}) == Admission(usable=40, refused=8)
    request = RequestAlignment(64, k=7)
    assert request.admit(target_hit=48, states=()) == Admission(usable=0, refused=48)


def test_past_the_drafter_limit_the_request_decodes_plainly_to_its_end() -> None:
    """F73: 98 to 102 tokens with a drafter limit of 100."""
    request = ready(97, k=2, drafter_limit=100, max_length=102)
    assert request.lengths.committed == 98
    assert request.block() == Block(context=range(97), positions=range(97, 100), proposals=2)
    assert play(request, [1, 2], accepted=1).after == Lengths(100, 99, 99)
    assert not request.drafting
    assert request.block() == Block(range(0), range(0), 0)
    with pytest.raises(BadInput, match="drafter limit 100"):
        request.draft([1])
    for committed in (101, 102):
        request.verify()
        commit = request.commit()
        assert commit.after == Lengths(committed, committed - 1, 99)
        assert len(commit.context_positions) == 0
    request.finish()
    assert request.phase is Phase.FINISHED


def test_an_exception_inside_verify_restores_the_lengths() -> None:
    request = ready(5)
    request.draft([7, 8, 9])
    request.verify()
    commit = request.rollback()
    assert commit.after == commit.before == request.lengths == Lengths(6, 5, 5)
    assert (commit.drop_rows, commit.snapshot_row, request.proposals) == (range(4), -1, ())
    assert play(request, [7, 8, 9], accepted=2).after == Lengths(9, 8, 8)


def test_a_skipped_request_comes_back_without_placeholders() -> None:
    """F76."""
    request = ready(5)
    request.draft([7, 8])
    request.skip()
    assert request.proposals == ()
    with pytest.raises(BadInput, match=r"\[-1, -1\]"):
        request.draft([-1, -1])
    assert request.verify().proposals == 0


def test_abort_inside_a_forward_keeps_only_what_was_committed() -> None:
    request = ready(5)
    request.draft([7])
    request.verify()
    assert request.abort() == Lengths(6, 5, 5)
    assert request.lengths == Lengths(6, 0, 0)
    with pytest.raises(TransitionError, match="cannot abort: the request is finished"):
        request.abort()


def test_numbers_out_of_range_are_refused_and_change_nothing() -> None:
    for arguments, message in [
        ({"prompt_length": 0, "k": 3}, "at least one token"),
        ({"prompt_length": 4, "k": -1}, "number of proposals"),
        ({"prompt_length": 4, "k": 3, "max_length": 4}, "leaves nothing to emit"),
    ]:
        with pytest.raises(BadInput, match=message):
            RequestAlignment(**arguments)
    request = ready(5)
    with pytest.raises(BadInput, match="4 proposals, but k is 3"):
        request.draft([1, 2, 3, 4])
    request.draft([1, 2])
    request.verify()
    for accepted, kept in [(3, None), (-1, None), (1, 3), (1, 0)]:
        with pytest.raises(BadInput):
            request.commit(accepted, kept)
    assert request.commit(2).after == Lengths(9, 8, 8)


def test_an_engine_that_disagrees_is_told_in_which_number() -> None:
    request = ready(5)
    assert request.differences(committed=6, target_kv=5, drafter_context=5) == ()
    assert request.differences(target_kv=6, drafter_context=4) == (
        "target_kv is 6 in the engine, 5 by the rules (phase ready)",
        "drafter_context is 4 in the engine, 5 by the rules (phase ready)",
    )


def test_3000_random_steps() -> None:
    before = sum(steps.values())
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        AlignmentMachine,
        settings=settings(
            max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=checks, database=None
        ),
    )
    assert sum(steps.values()) - before >= 3000
    assert steps["verify"] > 500, "most lives should get to their rounds"
    assert all(steps[name] for name in ("rollback", "preempt", "skip", "abort", "finish", "out of order"))
