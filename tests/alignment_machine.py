"""An engine made of lists, driven by the package's state machine and checked against what must lie in every slot.

Every token gets an id of its own, so a slot that holds another position's token is noticed. Slots that were never
written, were dropped, or hold a block's scratch are absent from the dictionaries: reading one is a KeyError.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dflash_plugins.alignment import Commit, Forward, Lengths, RequestAlignment, TransitionError

steps: Counter[str] = Counter()

# Which step is legal where, written by hand.
ALLOWED = {
    "admit": ("waiting",),
    "prefill": ("prefill", "ready"),
    "block": ("ready",),
    "draft": ("ready",),
    "skip": ("waiting", "prefill", "ready", "drafted"),
    "verify": ("ready", "drafted"),
    "commit": ("forward",),
    "rollback": ("forward",),
    "finish": ("ready",),
}

NATURAL = {"waiting": ["admit"], "prefill": ["prefill"], "drafted": ["verify"], "forward": ["commit"]}
RARE = {
    "waiting": ["abort"],
    "prefill": ["abort", "preempt"],
    "ready": ["abort", "preempt", "finish"],
    "drafted": ["abort", "preempt"],
    "forward": ["abort"],
}


def fold(state: int, token: int) -> int:
    """Toy recurrence: order matters, and no step can be undone by cropping."""
    return (state * 1_000_003 + token + 1) % (2**61 - 1)


@dataclass
class Slots:
    """What an engine holds for one request: one token per slot, and one recurrent state."""

    target: dict[int, int] = field(default_factory=dict)
    context: dict[int, int] = field(default_factory=dict)
    state: int = 0


class AlignmentMachine(RuleBasedStateMachine):
    """Random life of requests. ``where`` is the model's own idea of the phase; it never asks the package."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.fresh = count()
        self._new_request(data)

    def _new_request(self, data: st.DataObject) -> None:
        self.tokens = [next(self.fresh) for _ in range(data.draw(st.integers(1, 24)))]
        self.k = data.draw(st.sampled_from([3, 2, 7, 1, 0]))
        self.limit = data.draw(st.none() | st.none() | st.integers(1, 60))
        room = data.draw(st.none() | st.none() | st.integers(1, 40))
        self.max_length = None if room is None else len(self.tokens) + room
        self.request = RequestAlignment(
            len(self.tokens), k=self.k, drafter_limit=self.limit, max_length=self.max_length
        )
        self.slots, self.where, self.drafted = Slots(), "waiting", []

    # -- the model's own arithmetic, from lists only

    def block_slots(self) -> list[int]:
        """Slots a block would need, or none when it does not fit or no drafter is served."""
        wanted = list(range(len(self.tokens) - 1, len(self.tokens) + self.k))
        fits = all(self.limit is None or slot < self.limit for slot in wanted)
        return wanted if fits and self.k else []

    def full(self) -> bool:
        return self.max_length is not None and len(self.tokens) >= self.max_length

    def settle(self) -> None:
        self.where = "ready" if len(self.slots.target) == len(self.tokens) - 1 else "prefill"

    @rule(data=st.data(), luck=st.integers(0, 31))
    def move(self, data: st.DataObject, luck: int) -> None:
        """One rule for all steps, so that no example switches the natural ones off: most lives must get far."""
        if luck < 24:
            ready = ["finish"] if self.full() else ["draft", "draft", "draft", "verify", "prefill"]
            self.step(data, ready if self.where == "ready" else NATURAL[self.where])
        elif luck < 30:
            self.step(data, ["rollback" if self.where == "forward" else "skip", "out_of_order"])
        else:
            # An engine ends a request with all its tokens; preempted, it could only wait to be ended.
            self.step(data, [name for name in RARE[self.where] if name != "preempt" or not self.full()])

    def step(self, data: st.DataObject, possible: list[str]) -> None:
        getattr(self, data.draw(st.sampled_from(possible)))(data)

    # -- steps

    def admit(self, data: st.DataObject) -> None:
        steps["admit"] += 1
        n = len(self.tokens)
        hit, drafter_hit = data.draw(st.integers(0, n)), data.draw(st.none() | st.integers(0, n))
        states = data.draw(st.none() | st.sets(st.integers(0, n), max_size=4))
        admission = self.request.admit(hit, drafter_hit, states)
        found_by_drafter = hit if drafter_hit is None else drafter_hit
        cached = Slots(dict(enumerate(self.tokens[:hit])), dict(enumerate(self.tokens[:found_by_drafter])))
        usable, drafts = admission.usable, bool(self.block_slots())
        self.slots = Slots(
            {slot: cached.target[slot] for slot in range(usable)},
            {slot: cached.context[slot] for slot in range(usable)} if drafts else {},
        )
        assert usable < n
        assert usable + admission.refused == hit
        assert states is None or usable in states | {0}
        for token in self.tokens[:usable]:
            self.slots.state = fold(self.slots.state, token)
        best = [
            length
            for length in range(n)
            if length <= hit
            and (not drafts or length <= found_by_drafter)
            and (states is None or length in states or length == 0)
        ]
        assert usable == max(best), "a usable hit was thrown away"
        self.settle()

    def prefill(self, data: st.DataObject) -> None:
        steps["prefill"] += 1
        start = len(self.slots.target)
        rows = data.draw(st.integers(1, len(self.tokens) - start))
        forward = self.request.prefill(rows)
        assert list(forward.positions) == list(range(start, start + rows))
        assert forward.samples == (start + rows == len(self.tokens))
        self.run(forward, self.tokens[start : start + rows])

    def draft(self, data: st.DataObject) -> None:
        steps["draft"] += 1
        block = self.request.block()
        assert list(block.positions) == self.block_slots()
        for slot in block.context:
            assert self.slots.context[slot] == self.tokens[slot]
        assert len(block.context) == (len(self.tokens) - 1 if self.block_slots() else 0)
        for slot in block.positions:
            self.slots.context.pop(slot, None)  # the block's own rows are scratch
        most = self.k if self.block_slots() else 0
        wanted = data.draw(st.just(most) | st.integers(0, most))
        ids = [next(self.fresh) for _ in range(wanted)]
        room = wanted if self.max_length is None else max(0, self.max_length - len(self.tokens) - 1)
        self.drafted = list(self.request.draft(ids))
        assert self.drafted == ids[:room]
        self.where = "drafted"

    def skip(self, _data: st.DataObject) -> None:
        steps["skip"] += 1
        self.request.skip()
        assert self.request.proposals == ()
        self.drafted = []
        self.where = "ready" if self.where == "drafted" else self.where

    def verify(self, _data: st.DataObject) -> None:
        steps["verify"] += 1
        forward = self.request.verify()
        start = len(self.tokens) - 1
        assert list(forward.positions) == list(range(start, start + 1 + len(self.drafted)))
        assert forward.samples
        self.run(forward, [self.tokens[-1], *self.drafted])

    def run(self, forward: Forward, row_tokens: list[int]) -> None:
        """Read everything before the rows, write the rows, remember the state after each."""
        for slot in range(forward.positions.start):
            assert self.slots.target[slot] == self.tokens[slot]
        assert len(row_tokens) == forward.rows
        self.saved_lengths, self.forward, self.row_tokens = self.request.lengths, forward, row_tokens
        self.row_states = [self.slots.state]  # entry i is the state before row i
        for slot, token in zip(forward.positions, row_tokens, strict=True):
            self.slots.target[slot] = token
            self.row_states.append(fold(self.row_states[-1], token))
        self.where = "forward"

    def commit(self, data: st.DataObject) -> None:
        steps["commit"] += 1
        kept: list[int] = []
        if self.forward.samples:
            accepted = data.draw(st.integers(0, len(self.drafted)))
            emitted = [*self.drafted[:accepted], next(self.fresh)]
            kept = emitted[: data.draw(st.integers(1, len(emitted)))]
            commit = self.request.commit(accepted, len(kept))
        else:
            commit = self.request.commit()
        self.tokens += kept
        self.follow(commit)
        assert not kept or len(self.slots.target) == len(self.tokens) - 1

    def rollback(self, _data: st.DataObject) -> None:
        steps["rollback"] += 1
        commit = self.request.rollback()
        assert commit.after == commit.before == self.saved_lengths
        self.follow(commit)

    def follow(self, commit: Commit) -> None:
        """Do to the slots exactly what the commit says; the invariants look at the outcome."""
        assert [*commit.keep_rows, *commit.drop_rows] == list(range(self.forward.rows))
        for row in commit.drop_rows:
            del self.slots.target[self.forward.positions[row]]
        written = len(commit.context_positions)
        rows = list(commit.keep_rows)[len(commit.keep_rows) - written :]
        for slot, row in zip(commit.context_positions, rows, strict=True):
            self.slots.context[slot] = self.row_tokens[row]
        self.slots.state = self.row_states[commit.snapshot_row + 1]
        self.drafted = []
        self.settle()

    def preempt(self, _data: st.DataObject) -> None:
        steps["preempt"] += 1
        self.check_valid(self.request.preempt())
        self.slots, self.drafted, self.where = Slots(), [], "waiting"

    def abort(self, data: st.DataObject) -> None:
        steps["abort"] += 1
        if self.where == "forward":
            for slot in self.forward.positions:
                del self.slots.target[slot]
        self.check_valid(self.request.abort())
        self.end(data)

    def finish(self, data: st.DataObject) -> None:
        steps["finish"] += 1
        self.check_valid(self.request.finish())
        self.end(data)

    def end(self, data: st.DataObject) -> None:
        self.where = "finished"
        with pytest.raises(TransitionError):
            self.request.abort()
        self._new_request(data)

    def check_valid(self, valid: Lengths) -> None:
        assert valid.committed == len(self.tokens)
        assert [self.slots.target[slot] for slot in range(valid.target_kv)] == self.tokens[: valid.target_kv]
        assert [self.slots.context[slot] for slot in range(valid.drafter_context)] == self.tokens[
            : valid.drafter_context
        ]

    def out_of_order(self, data: st.DataObject) -> None:
        action = data.draw(st.sampled_from([name for name, places in ALLOWED.items() if self.where not in places]))
        steps["out of order"] += 1
        arguments = {"prefill": [1], "draft": [[]]}.get(action, [])
        before = self.request.lengths, self.request.phase, self.request.proposals
        with pytest.raises(TransitionError, match=str(self.request.phase)):
            getattr(self.request, action)(*arguments)
        assert (self.request.lengths, self.request.phase, self.request.proposals) == before

    # -- what must hold after every step

    @invariant()
    def slots_hold_the_right_tokens(self) -> None:
        lengths = self.request.lengths
        assert lengths.committed == len(self.tokens)
        assert self.request.proposals == tuple(self.drafted)
        if self.where == "forward":
            assert lengths == self.saved_lengths
            return
        assert len(self.slots.target) == lengths.target_kv
        assert [self.slots.target[slot] for slot in range(lengths.target_kv)] == self.tokens[: lengths.target_kv]
        state = 0
        for token in self.tokens[: lengths.target_kv]:
            state = fold(state, token)
        assert self.slots.state == state
        assert self.request.differences(committed=len(self.tokens), target_kv=len(self.slots.target)) == ()

    @invariant()
    def drafter_is_level_with_the_target(self) -> None:
        lengths = self.request.lengths
        if self.where in ("ready", "drafted"):
            assert lengths.target_kv == len(self.tokens) - 1
        if self.block_slots() and self.where != "forward":
            assert lengths.drafter_context == lengths.target_kv
        assert lengths.drafter_context <= lengths.target_kv
        assert self.limit is None or lengths.drafter_context <= self.limit
        context = [self.slots.context.get(slot) for slot in range(lengths.drafter_context)]
        assert context == self.tokens[: lengths.drafter_context]
