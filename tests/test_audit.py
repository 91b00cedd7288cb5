"""What the audit says of steps written down by hand: a prompt of five tokens, K = 3, vocabulary of 50, mask 49."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dflash_plugins import audit, hooks
from dflash_plugins.audit import Drafting, Report, RequestAudit, Seen, Served
from dflash_plugins.errors import BadInput
from dflash_plugins.switches import AUDIT
from vllm_ext import audit as vllm_audit

LOGGER = logging.getLogger("vllm.dflash_plugins")
PROMPT, SERVED, MASK = (10, 11, 12, 13, 14), Served(3, 50, 49), 49


def drafting(first, kept, given=None):
    """What a right engine gives the drafter: ``kept`` of ``given`` rows from position ``first``."""
    end = first + kept
    rows = list(range(first, first + (kept if given is None else given)))
    block = list(range(end, end + 4))
    slots = [100 + place for place in rows[:kept]]
    return Drafting(rows, kept, end, block, [0, MASK, MASK, MASK], (slots, list(slots)))


def with_anchor(step, token):
    return replace(step, drafting=replace(step.drafting, block_ids=[token, MASK, MASK, MASK]))


# The prompt in chunks of three and two; the second emits 20. Then [21, 22, 23] are drafted, of which the target takes
# 21 and corrects 22 to 30; then nothing was drafted; then [31, 32, 33] are all taken, with the bonus 34.
CHUNK = Seen((0, 1, 2), (10, 11, 12), 0, None, drafting=drafting(0, 3), drafts=(1, 2, 3))
PROMPT_END = with_anchor(Seen((3, 4), (13, 14), 0, (20,), (20,), drafting=drafting(3, 2), drafts=(21, 22, 23)), 20)
CORRECTED = with_anchor(
    Seen(
        (5, 6, 7, 8), (20, 21, 22, 23), 3, (21, 30), (21, 30, 23, 24),
        drafting=drafting(5, 2, given=4), drafts=(),
    ), 30,
)  # fmt: skip
PLAIN = with_anchor(Seen((7,), (30,), 0, (9,), (9,), drafting=drafting(7, 1), drafts=(31, 32, 33)), 9)
WHOLE = with_anchor(
    Seen((8, 9, 10, 11), (9, 31, 32, 33), 3, (31, 32, 33, 34), (31, 32, 33, 34), drafting=drafting(8, 4)), 34
)
RIGHT = (CHUNK, PROMPT_END, CORRECTED, PLAIN, WHOLE)


def found(steps, **named):
    """[(step, kind, expected, got)] of all steps of one request."""
    one = RequestAudit(PROMPT, named.pop("served", SERVED), greedy=True, **named)
    return [(n, m.kind, m.expected, m.got) for n, step in enumerate(steps) for m in one.round(step)]


def with_step(number, **changes):
    """The right steps, one of them changed."""
    return [replace(step, **changes) if n == number else step for n, step in enumerate(RIGHT)]


def with_drafting(number, **changes):
    return with_step(number, drafting=replace(RIGHT[number].drafting, **changes))


def test_nothing_is_said_of_an_engine_that_follows_the_rules():
    assert found(RIGHT) == []


def test_an_altered_token_is_named_once_and_the_request_is_followed_from_there():
    steps = with_step(2, emitted=(21, 31))
    steps[2] = with_anchor(steps[2], 31)
    steps[3] = replace(steps[3], ids=(31,))
    assert found(steps) == [(2, "emitted", [21, 30], [21, 31])]


def test_too_many_and_too_few_accepted_are_named():
    assert (2, "accepted", 1, 2) in found(with_step(2, emitted=(21, 22, 30)))
    assert (4, "accepted", 3, 1) in found(with_step(4, emitted=(31, 32)))


def test_equal_tokens_after_the_first_difference_do_not_count():
    assert (2, "accepted", 1, 2) in found(with_step(2, emitted=(21, 30, 23)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kept": 3}, ("rows_kept", 2, 3)),
        ({"kept": 1}, ("rows_kept", 2, 1)),
        ({"positions": [6, 7, 8, 9]}, ("context_positions", [5, 6], [6, 7])),
        ({"context": 8}, ("drafter_context", 7, 8)),
        ({"context": 6}, ("drafter_context", 7, 6)),
        ({"slots": ([105, 107], [105, 106])}, ("context_slots", [105, 106], [105, 107])),
        ({"block_positions": [8, 9, 10, 11]}, ("block_positions", [7, 8, 9, 10], [8, 9, 10, 11])),
        ({"block_positions": [7, 8, 9]}, ("block_positions", [7, 8, 9, 10], [7, 8, 9])),
        ({"block_ids": [21, MASK, MASK, MASK]}, ("block_ids", [30, MASK, MASK, MASK], [21, MASK, MASK, MASK])),
        ({"block_ids": [30, 30, MASK, MASK]}, ("block_ids", [30, MASK, MASK, MASK], [30, 30, MASK, MASK])),
    ],
)
def test_what_the_drafter_was_wrongly_given_is_named(changes, said):
    assert (2, *said) in found(with_drafting(2, **changes))


def test_a_block_amid_the_prompt_is_void_but_its_context_is_not():
    assert found(with_drafting(0, block_ids=[1, 2, 3, 4])) == []
    assert (0, "drafter_context", 3, 4) in found(with_drafting(0, context=4))


def test_a_forward_at_the_wrong_place_is_named_once():
    shifted = with_step(3, positions=(8,), ids=(9,))
    assert found(shifted)[0] == (3, "target_kv", 7, 8)
    assert (3, "positions", [7], [8]) not in found(shifted)


def test_rows_that_do_not_follow_each_other_are_named():
    assert (2, "positions", [5, 6, 7, 8], [5, 6, 7, 9]) in found(with_step(2, positions=(5, 6, 7, 9)))


def test_other_ids_than_the_committed_ones_are_named():
    assert (1, "input_ids", [13, 14], [13, 15]) in found(with_step(1, ids=(13, 15)))


def test_verifying_what_was_not_drafted_is_named():
    assert found(with_step(1, drafts=(21, 22))) == [(2, "proposals", [21, 22], [21, 22, 23])]


def test_fewer_proposals_than_drafted_are_verified_in_order():
    cut = with_step(2, positions=(5, 6), ids=(20, 21), proposals=1, choices=(21, 30), drafting=drafting(5, 2))
    cut[2] = with_anchor(cut[2], 30)
    assert found(cut) == []


def test_a_round_filled_up_by_the_engine_is_a_shorter_round():
    filled = with_step(3, positions=(7, 8, 9, 10), ids=(30, -1, -1, -1), proposals=3, choices=(9, 1, 1, 1))
    assert found(filled) == []
    accepted = with_step(3, positions=(7, 8, 9, 10), ids=(30, -1, -1, -1), proposals=3, emitted=(-1, 9), choices=(9, 9))
    assert {kind for _, kind, _, _ in found(accepted)} >= {"accepted", "emitted"}


def test_proposals_amid_a_prompt_are_a_step_that_the_rules_do_not_have():
    steps = with_step(1, ids=(13, 21), proposals=1)
    assert [(n, kind) for n, kind, _, _ in found(steps) if kind == "step"] == [(1, "step")]


def test_a_chunk_that_emits_and_a_round_that_does_not_are_named():
    assert (0, "samples", False, True) in found(with_step(0, emitted=(7,)))
    assert (1, "samples", True, False) in found(with_step(1, emitted=None))


def test_a_request_that_was_lost_may_sit_out_a_step():
    one = RequestAudit(PROMPT, SERVED, greedy=True)
    one.round(CHUNK)
    one.round(replace(PROMPT_END, emitted=None))
    one.skip()
    assert [m.kind for m in one.round(with_anchor(replace(PROMPT_END, drafts=()), 20))] == []


@pytest.mark.parametrize("drafts", [(21, 22, 50), (-1, 22, 23)])
def test_drafts_outside_of_the_vocabulary_are_named(drafts):
    assert "drafted" in {kind for n, kind, _, _ in found(with_step(1, drafts=drafts)) if n == 1}


def test_a_block_of_masks_was_not_drafted_but_one_mask_may_be_chosen():
    assert (1, "mask_left", False, True) in found(with_step(1, drafts=(MASK, MASK, MASK)))
    assert "mask_left" not in {kind for _, kind, _, _ in found(with_step(1, drafts=(21, MASK, 23)))}


def test_more_drafts_than_k_are_named():
    assert "drafted" in {kind for _, kind, _, _ in found(with_step(1, drafts=(21, 22, 23, 24)))}


def test_context_that_was_never_written_is_named_when_it_is_read():
    assert found(with_step(2, drafting=None))[0] == (3, "context_hole", 0, 2)


def test_the_end_of_the_positions_caps_a_block_where_the_engine_caps_it():
    capped = with_drafting(2, block_positions=[7, 8, 8, 8])
    assert (2, "block_positions") not in [one[:2] for one in found(capped, served=replace(SERVED, limit=9))]
    assert (2, "block_positions") in [one[:2] for one in found(capped)]


def test_a_preempted_request_comes_back_with_its_tokens_and_a_prefix_hit():
    one = RequestAudit(PROMPT, SERVED, greedy=True)
    assert [m for step in RIGHT[:3] for m in one.round(step)] == []
    one.skip()
    one.resume(None, hit=4)
    again = Seen((4, 5, 6, 7), (14, 20, 21, 30), 0, (9,), (9,), drafting=drafting(4, 4), drafts=(31, 32, 33))
    assert one.round(with_anchor(again, 9)) == []
    assert one.round(WHOLE) == []


def test_tokens_given_up_at_a_preemption_are_not_held_against_the_engine():
    one = RequestAudit(PROMPT, SERVED, greedy=True)
    assert [m for step in RIGHT[:2] for m in one.round(step)] == []
    one.resume(PROMPT, hit=0)
    again = Seen((0, 1, 2, 3, 4), PROMPT, 0, (20,), (20,), drafting=drafting(0, 5), drafts=(21, 22, 23))
    assert one.round(with_anchor(again, 20)) == []
    assert one.round(CORRECTED) == []


def test_a_prefix_hit_is_where_the_first_forward_begins():
    steps = [replace(PROMPT_END, drafting=PROMPT_END.drafting), CORRECTED]
    assert found(steps, hit=3) == []
    assert found(steps, hit=2)[0] == (0, "target_kv", 2, 3)


# Sampled requests: no choices; what is allowed, q of the proposals, p and q of a correction

SAMPLED = replace(CORRECTED, choices=None, allowed=(True, True))


def sampled(**changes):
    one = RequestAudit(PROMPT, SERVED, greedy=False)
    steps = [CHUNK, replace(PROMPT_END, choices=None, allowed=(True,)), replace(SAMPLED, **changes)]
    return [(m.kind, m.expected, m.got) for step in steps for m in one.round(step)]


def test_nothing_is_said_of_a_sampled_round_that_can_be():
    assert sampled() == []
    assert sampled(q=(0.5, 0.2, 0.1), correction=(0.4, 0.3)) == []


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"emitted": (22, 30)}, "emitted"),
        ({"emitted": (21, 22)}, "correction"),
        ({"emitted": (21, 22, 23, 24, 25)}, "accepted"),
        ({"emitted": ()}, "accepted"),
        ({"allowed": (True, False)}, "support"),
        ({"emitted": (21, 50)}, "emitted"),
        ({"q": (0.5, 0.0, 0.1)}, "q"),
        ({"q": (0.5, float("nan"), 0.1)}, "q"),
        ({"q": (0.5, 0.2, 0.1), "correction": (0.2, 0.3)}, "correction"),
    ],
)
def test_what_cannot_be_in_a_sampled_round_is_named(changes, kind):
    assert kind in {one for one, _, _ in sampled(**changes)}


def test_with_a_real_q_a_token_may_be_replaced_by_itself_only_with_more_chance():
    """p(y) > q(y) never rejects, so the same token as a correction shows p <= q."""
    assert sampled(emitted=(21, 22), q=(0.5, 0.2, 0.1), correction=(0.1, 0.2))[0][0] == "correction"


# The report


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    monkeypatch.setenv(AUDIT, str(path))
    yield path
    vllm_audit.undo()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_holds_the_mismatches_and_the_counts_of_the_last_step_before_it_is_closed(file, caplog):
    caplog.set_level(logging.INFO, logger="vllm.dflash_plugins")
    report, one = Report(file, LOGGER), RequestAudit(PROMPT, SERVED, greedy=True)
    report.counts.requests += 1
    for step in with_drafting(2, context=9):
        report.step("r-1", one, step)
        report.flush()
    assert lines(file)[0] == {
        "round": 3, "request": "r-1", "expected": 7, "got": 9,
        "what": {"kind": "drafter_context", "rule": "drafter_context is 9 in the engine, 7 by the rules (phase ready)"},
    }  # fmt: skip
    counts, mismatches = audit.read(file)
    assert len(mismatches) == 1
    assert counts.mismatches == {"drafter_context": 1}
    assert vars(counts) | {"mismatches": None} == {
        "rounds": 4, "verified": 2, "padded": 0, "chunks": 1, "requests": 1, "proposed": 6, "accepted": 4, "emitted": 8,
        "blocks": 5, "unaudited": 0, "mismatches": None,
    }  # fmt: skip
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [r.name for r in said] == ["vllm.dflash_plugins"]
    assert "r-1" in said[0].getMessage()
    report.close()


def test_a_second_run_of_the_same_file_adds_to_it(file):
    for _ in range(2):
        report, one = Report(file, LOGGER), RequestAudit(PROMPT, SERVED, greedy=True)
        for step in RIGHT:
            report.step("r", one, step)
        report.close()
    assert audit.read(file)[0].rounds == 8


def test_a_file_that_another_process_writes_to_is_not_shared(file, caplog):
    first, second = Report(file, LOGGER), Report(file, LOGGER)
    assert second.path.name == f"audit.jsonl.pid{os.getpid()}"
    assert str(second.path) in caplog.text
    first.counts.rounds = second.counts.rounds = 3
    first.close()
    second.close()
    assert audit.read(file)[0].rounds == 6


def test_ranks_write_files_of_their_own(file):
    for rank in range(2):
        report = Report(file, LOGGER, f".rank{rank}")
        report.counts.emitted = 5
        report.close()
    assert not file.exists()
    assert audit.read(file)[0].emitted == 10


def test_a_flood_is_counted_but_neither_logged_nor_written_without_end(file, caplog):
    report = Report(file, LOGGER)
    for number in range(audit.WRITTEN_PER_KIND + 5):
        report.mismatch("r", number, audit.Mismatch("q", 1, 2, "a rule"))
    report.close()
    counts, written = audit.read(file)
    assert counts.mismatches["q"] == len(written) + 5 == audit.WRITTEN_PER_KIND + 5
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == audit.LOGGED_PER_KIND + 1


def test_a_run_that_cannot_be_audited_is_refused_in_one_sentence(file, monkeypatch, caplog):
    gone = hooks.Hook("json", "JSONDecoder.decoded", hooks.Use.REPLACED, "to see what is not there")
    monkeypatch.setattr(vllm_audit, "AT_AUDIT_V1", (gone,))
    with pytest.raises(audit.AuditRefused, match=r"json\.JSONDecoder\.decoded is gone"):
        vllm_audit.install(None, v2=False)
    assert "cannot be installed" in caplog.text
    with pytest.raises(BadInput, match="JSONDecoder"):
        audit.read(file)


def test_no_audit_was_written_is_not_no_mismatch(tmp_path):
    with pytest.raises(BadInput, match="no audit"):
        audit.read(tmp_path / "nothing.jsonl")


def test_without_the_variable_nothing_of_it_is_even_imported():
    code = (
        "import sys, types; from vllm_ext import runner\n"
        "config = types.SimpleNamespace(use_v2_model_runner=False, speculative_config=None)\n"
        "runner.prepare(config)\n"
        "print([name for name in sys.modules if 'audit' in name and 'vllm_ext' in name])"
    )
    environment = {name: value for name, value in os.environ.items() if name != AUDIT}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
