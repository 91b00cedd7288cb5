"""What one request holds in its caches, step by step: lengths, rows to keep, rows to drop, the state to restore.

A request is in one phase at a time::

    WAITING --admit--> PREFILL, or READY when all but the newest token is in the target KV
    PREFILL --prefill--> FORWARD --commit--> PREFILL or READY
    READY --draft--> DRAFTED --verify--> FORWARD --commit--> READY
    READY --verify or prefill--> FORWARD      a round without proposals: plain decoding
    DRAFTED --skip--> READY                   the request sits out a step; its draft is void
    FORWARD --rollback--> PREFILL or READY    the forward failed; nothing of it stays
    PREFILL, READY, DRAFTED --preempt--> WAITING
    READY --finish--> FINISHED, any phase --abort--> FINISHED

In READY, with n committed tokens, target KV = n - 1 and, while the drafter is in use, drafter context = n - 1: the
newest token has no K/V anywhere. After a round that keeps e tokens, n grows by e and both lengths are n - 1 again.
Nothing here looks at a tensor. Positions are slots: position p of a request lies in slot p of its caches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dflash_plugins.errors import BadInput, DFlashPluginsError


class TransitionError(DFlashPluginsError):
    """A step was asked for that the phase of the request does not allow."""


class Phase(StrEnum):
    """Where a request stands; see the module's picture."""

    WAITING = "waiting"
    PREFILL = "prefill"
    READY = "ready"
    DRAFTED = "drafted"
    FORWARD = "forward"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Three different numbers of one request, all in tokens: known tokens, target K/V rows, drafter context rows."""

    committed: int
    target_kv: int
    drafter_context: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What of a prefix-cache hit is used.

    ``usable`` tokens are taken over; the recurrent state to restore, if the target has any, is the one after exactly
    that many tokens. ``refused`` more target rows were found and must be computed again, because the drafter's context
    or the recurrent state is missing for them.
    """

    usable: int
    refused: int


@dataclass(frozen=True, slots=True)
class Block:
    """How to draft: read context ``context``, run query rows at ``positions``, keep at most ``proposals`` of them."""

    context: range
    positions: range
    proposals: int


@dataclass(frozen=True, slots=True)
class Forward:
    """One target forward: its rows lie at ``positions``; the last ``proposals`` rows are drafted tokens.

    ``samples`` is false for a prompt chunk that ends before the newest token: it emits nothing.
    """

    positions: range
    proposals: int
    samples: bool

    @property
    def rows(self) -> int:
        """Number of rows of the forward."""
        return len(self.positions)

    @property
    def anchor_row(self) -> int:
        """Row of the newest committed token (meaningless when the forward does not sample)."""
        return self.rows - 1 - self.proposals


@dataclass(frozen=True, slots=True)
class Commit:
    """What to do with the caches after a forward.

    Target K/V of ``keep_rows`` stays, of ``drop_rows`` goes; the drafter's context K/V at ``context_positions`` is to
    be written from the target features of the last rows of ``keep_rows`` (as many as there are positions). A state
    that cannot be cropped becomes the one after row ``snapshot_row``; -1 is the one before the forward.
    """

    before: Lengths
    after: Lengths
    keep_rows: range
    drop_rows: range
    context_positions: range

    @property
    def snapshot_row(self) -> int:
        """Row after which the recurrent state is the right one."""
        return len(self.keep_rows) - 1


class RequestAlignment:
    """The state machine of one request.

    ``k``: proposals per round as served. ``drafter_limit``: positions the drafter can serve; once a whole block no
    longer fits below it, the request goes on as plain decoding. ``max_length``: most tokens, prompt included, that the
    request may reach. Raises ``BadInput`` for numbers out of range and ``TransitionError`` for a step out of order;
    neither changes the machine.
    """

    def __init__(
        self, prompt_length: int, *, k: int, drafter_limit: int | None = None, max_length: int | None = None
    ) -> None:
        _require(prompt_length >= 1, f"a prompt has at least one token, not {prompt_length}")
        _require(k >= 0, f"k is a number of proposals, not {k}")
        _require(
            max_length is None or max_length > prompt_length,
            f"max_length {max_length} leaves nothing to emit after {prompt_length} prompt tokens",
        )
        self.k = k
        self.drafter_limit = drafter_limit
        self.max_length = max_length
        self.phase = Phase.WAITING
        self.lengths = Lengths(prompt_length, 0, 0)
        self.proposals: tuple[int, ...] = ()
        self._forward: Forward | None = None

    @property
    def drafting(self) -> bool:
        """Whether a whole block still fits the drafter; once false it stays false."""
        fits = self.drafter_limit is None or self.lengths.committed + self.k <= self.drafter_limit
        return self.k > 0 and fits

    @property
    def remaining(self) -> int | None:
        """Tokens that may still be emitted; None without a limit."""
        return None if self.max_length is None else self.max_length - self.lengths.committed

    def admit(
        self, target_hit: int = 0, drafter_hit: int | None = None, states: Collection[int] | None = None
    ) -> Admission:
        """Start, or start again after ``preempt``, with ``target_hit`` target rows found in a prefix cache.

        ``drafter_hit``: context rows of the drafter found with them (None: as many). The features of reused target rows
        are gone, so the drafter cannot write missing rows later: the hit is cut to what both have. ``states``: token
        counts for which a recurrent state is kept; None when the target has no such state.
        """
        self._allow("admit", Phase.WAITING)
        drafter_hit = target_hit if drafter_hit is None else drafter_hit
        _require(target_hit >= 0 and drafter_hit >= 0, "a prefix hit cannot be negative")
        usable = min(target_hit, self.lengths.committed - 1)
        if self.drafting:
            usable = min(usable, drafter_hit)
        if states is not None:
            usable = max((length for length in states if 0 <= length <= usable), default=0)
        self.lengths = Lengths(self.lengths.committed, usable, usable if self.drafting else 0)
        self._settle()
        return Admission(usable, max(0, target_hit - usable))

    def prefill(self, rows: int) -> Forward:
        """Start a forward over the next ``rows`` known tokens; the chunk that ends with the newest one samples."""
        self._allow("prefill", Phase.PREFILL, Phase.READY)
        start, missing = self.lengths.target_kv, self.lengths.committed - self.lengths.target_kv
        _require(1 <= rows <= missing, f"a chunk of {rows} rows, but {missing} tokens are left to prefill")
        return self._start(Forward(range(start, start + rows), proposals=0, samples=rows == missing))

    def block(self) -> Block:
        """Say how to draft the next round. ``proposals`` 0 means: do not draft, decode plainly.

        The block keeps its k mask rows however few proposals may be kept: fewer masks would change all of them.
        """
        self._allow("plan a block", Phase.READY)
        if not self.drafting:
            return Block(range(0), range(0), 0)
        context = self.lengths.drafter_context
        kept = self.k if self.remaining is None else max(0, min(self.k, self.remaining - 1))
        return Block(range(context), range(context, context + 1 + self.k), kept)

    def draft(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Take the drafted token ids of this round and return those to verify, cut to ``block().proposals``."""
        block = self.block()
        _require(len(ids) <= self.k, f"{len(ids)} proposals, but k is {self.k}")
        _require(all(token >= 0 for token in ids), f"a proposal is a token id; got {list(ids)}")
        _require(not ids or self.drafting, f"no block fits the drafter limit {self.drafter_limit} any more")
        self.proposals = tuple(ids[: block.proposals])
        self.phase = Phase.DRAFTED
        return self.proposals

    def skip(self) -> None:
        """Sit out one step. A draft made before is void: the request comes back with an empty list."""
        self._allow("skip", Phase.WAITING, Phase.PREFILL, Phase.READY, Phase.DRAFTED)
        self.proposals = ()
        if self.phase is Phase.DRAFTED:
            self.phase = Phase.READY

    def verify(self) -> Forward:
        """Start the target forward over the anchor and the proposals."""
        self._allow("verify", Phase.READY, Phase.DRAFTED)
        start = self.lengths.target_kv
        positions = range(start, start + 1 + len(self.proposals))
        return self._start(Forward(positions, len(self.proposals), samples=True))

    def commit(self, accepted: int = 0, kept: int | None = None) -> Commit:
        """End the forward. ``kept``: emitted tokens left after EOS, stop and length cuts (None: all accepted + 1)."""
        forward = self._running("commit")
        emitted = accepted + 1 if forward.samples else 0
        kept = emitted if kept is None else kept
        _require(0 <= accepted <= forward.proposals, f"{accepted} accepted of {forward.proposals} proposals")
        _require(min(1, emitted) <= kept <= emitted, f"{kept} tokens kept of {emitted} emitted")
        rows = forward.anchor_row + kept if forward.samples else forward.rows
        return self._end(forward, rows, kept)

    def rollback(self) -> Commit:
        """The forward failed: no row of it stays, lengths are what they were, a draft is void."""
        return self._end(self._running("roll back"), 0, 0)

    def preempt(self) -> Lengths:
        """Give up all slots; returns how much of them was valid (what a prefix cache may keep)."""
        self._allow("preempt", Phase.PREFILL, Phase.READY, Phase.DRAFTED)
        return self._release(Phase.WAITING)

    def finish(self) -> Lengths:
        """End the request after a commit; returns how much of its slots was valid."""
        self._allow("finish", Phase.READY)
        return self._release(Phase.FINISHED)

    def abort(self) -> Lengths:
        """End the request at any moment; rows of a running forward do not count as valid."""
        self._allow("abort", *(phase for phase in Phase if phase is not Phase.FINISHED))
        return self._release(Phase.FINISHED)

    def differences(
        self, *, committed: int | None = None, target_kv: int | None = None, drafter_context: int | None = None
    ) -> tuple[str, ...]:
        """Compare with lengths that an engine reports (None: not reported); one sentence per difference."""
        reported = {"committed": committed, "target_kv": target_kv, "drafter_context": drafter_context}
        return tuple(
            f"{name} is {value} in the engine, {getattr(self.lengths, name)} by the rules (phase {self.phase})"
            for name, value in reported.items()
            if value is not None and value != getattr(self.lengths, name)
        )

    def _allow(self, action: str, *phases: Phase) -> None:
        if self.phase not in phases:
            wanted = " or ".join(phases)
            raise TransitionError(f"cannot {action}: the request is {self.phase}, not {wanted}")

    def _running(self, action: str) -> Forward:
        self._allow(action, Phase.FORWARD)
        assert self._forward is not None
        return self._forward

    def _start(self, forward: Forward) -> Forward:
        if forward.samples and self.remaining == 0:
            raise TransitionError(f"cannot sample: all {self.max_length} tokens are there; finish the request")
        self._forward, self.phase = forward, Phase.FORWARD
        return forward

    def _end(self, forward: Forward, rows: int, kept: int) -> Commit:
        """Keep the first ``rows`` rows and ``kept`` new tokens."""
        before = self.lengths
        target_kv = before.target_kv + rows
        # Past its limit the drafter is never read again, so its context stops growing.
        context = target_kv if self.drafting else before.drafter_context
        self.lengths = Lengths(before.committed + kept, target_kv, context)
        self._forward, self.proposals = None, ()
        self._settle()
        return Commit(
            before=before,
            after=self.lengths,
            keep_rows=range(rows),
            drop_rows=range(rows, forward.rows),
            context_positions=range(before.drafter_context, context),
        )

    def _settle(self) -> None:
        ready = self.lengths.target_kv == self.lengths.committed - 1
        self.phase = Phase.READY if ready else Phase.PREFILL

    def _release(self, phase: Phase) -> Lengths:
        valid = self.lengths
        self.lengths = Lengths(valid.committed, 0, 0)
        self.phase, self.proposals, self._forward = phase, (), None
        return valid


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadInput(message)
