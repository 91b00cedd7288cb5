"""The audit: every round of the engine is derived again from the core, and what differs is written down.

``DFLASH_PLUGINS_AUDIT=FILE`` asks for it. This module holds what an engine is compared with and where that goes; the
adapters observe their engines and hand over one ``Seen`` per request and step. Without the variable nothing of this is
imported and nothing is wrapped.

FILE takes JSON lines: one per mismatch, ``{"round", "request", "what", "expected", "got"}``, and at the end of what a
process has written one ``{"summary": ...}`` with its counts so far, rewritten after every step, so that a process that
is killed leaves the counts of its last step. Several ranks write ``FILE.rank0``, ``FILE.rank1``, and so on; a file that
another process is writing to is not shared: the second one writes ``FILE.pid`` with its own number. Each says so in
its log. ``read`` adds all of them up.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

from dflash_plugins.alignment import Commit, Forward, Phase, RequestAlignment, TransitionError
from dflash_plugins.errors import BadInput, DFlashPluginsError
from dflash_plugins.switches import AUDIT, audit_file
from dflash_plugins.verify import verify_greedy_block

LOGGED_PER_KIND, WRITTEN_PER_KIND = 20, 1000
# Of the difference p - q where a correction is drawn from what is positive of it, both fp32.
ROUNDING = 1e-4
PLACEHOLDER = -1


class AuditRefused(DFlashPluginsError):
    """An audit was asked for and cannot be had; the run must not start unaudited."""


@dataclass(frozen=True)
class Drafting:
    """What the drafter was given for one request.

    ``positions``: those of the context rows, of which the first ``kept`` count. ``context``: number of context rows its
    block attends to, None if the engine has capped that. ``slots``: where the kept rows were written, and where the
    block table has their positions. An engine that drafts at the beginning of a round has the block apart from the
    context: without ``block_ids`` there is none here.
    """

    positions: Sequence[int]
    kept: int
    context: int | None
    block_positions: Sequence[int] = ()
    block_ids: Sequence[int] = ()
    slots: tuple[Sequence[int], Sequence[int]] = ((), ())


@dataclass(frozen=True)
class Seen:
    """What an engine did with one request in one step; all of it observed, nothing derived.

    ``positions`` and ``ids``: rows of the target forward, the last ``proposals`` of them drafted. ``emitted``: None
    for a prompt chunk that emits nothing. ``choices``: greedy requests only, the target's choice in every row.
    ``allowed``: sampled requests only, whether the row of each emitted token gives it any chance. ``q``: chance of
    each proposal as handed to the rejection sampler, None where proposals count as one-hot. ``correction``: p and q of
    the emitted token that replaced a proposal, where q is not one-hot. ``drafts``: what the runner keeps for the next
    step. ``drafting``: None where the drafter did not run.
    """

    positions: Sequence[int]
    ids: Sequence[int]
    proposals: int
    emitted: Sequence[int] | None
    choices: Sequence[int] | None = None
    allowed: Sequence[bool] = ()
    q: Sequence[float] | None = None
    correction: tuple[float, float] | None = None
    drafting: Drafting | None = None
    drafts: Sequence[int] = ()

    @property
    def known(self) -> int:
        """Number of rows before those of the proposals."""
        return len(self.ids) - self.proposals

    @property
    def proposed(self) -> tuple[int, ...]:
        """Ids of the proposals, without the -1 that the engine fills up with where rounds are to be equally long."""
        ids = list(self.ids[self.known :])
        while ids and ids[-1] == PLACEHOLDER:
            ids.pop()
        return tuple(ids)


@dataclass(frozen=True)
class Mismatch:
    """One thing that is not as the core has it; ``kind`` is what it is counted under."""

    kind: str
    expected: Any
    got: Any
    rule: str


@dataclass(frozen=True)
class Served:
    """What a run serves: K proposals per round over ``vocab_size`` ids; positions end before ``limit``, if any."""

    k: int
    vocab_size: int
    mask_token_id: int
    limit: int | None = None


class RequestAudit:
    """One request, followed through the core's state machine; where the engine errs once, it is followed from there.

    ``prompt``: ids; ``hit``: prompt tokens that the engine found in its prefix cache.
    """

    def __init__(self, prompt: Sequence[int], served: Served, *, greedy: bool, hit: int = 0) -> None:
        self.served, self.greedy, self.ids = served, greedy, list(prompt)
        self.rounds = 0
        self.machine = RequestAlignment(len(self.ids), k=served.k)
        self.machine.admit(hit)
        self.drafts: tuple[int, ...] = ()
        self._context_written = self.machine.lengths.drafter_context
        self._lost = False
        self._found: list[Mismatch] = []

    def resume(self, ids: Sequence[int] | None, hit: int) -> None:
        """Back after a preemption, ``hit`` tokens found in the prefix cache; ``ids`` all tokens, if the engine says."""
        if ids is not None and list(ids) == self.ids[: len(ids)]:
            self.ids = list(ids)  # what was in flight when the request was preempted may have been given up
        self._start_over(hit)
        self.drafts = ()

    def skip(self) -> None:
        """The request sits out a step."""
        if not self._lost:
            self.machine.skip()

    def block(self, drafting: Drafting, drafts: Sequence[int]) -> list[Mismatch]:
        """Where an engine drafts at the beginning of a round: what its drafter was given and gave, before ``round``."""
        self._found = []
        if not self._lost:
            for sentence in self.machine.differences(drafter_context=drafting.context):
                self._differs("drafter_context", self.machine.lengths.drafter_context, drafting.context, sentence)
            self._expect_block(self.machine.lengths.drafter_context, drafting)
        self._expect_drafts(drafts)
        return self._found

    def round(self, seen: Seen) -> list[Mismatch]:
        """Everything of this step that is not as the core has it."""
        self._found = []
        self.rounds += 1
        self._expect_start(seen)
        forward = self._forward(seen)
        commit = None if forward is None else self._commit(forward, seen)
        if forward is None:
            self.ids += seen.emitted or ()
        self._lost = commit is None
        if commit is not None and seen.drafting is not None:
            self._expect_drafting(commit, seen.drafting)
        self._expect_drafts(seen.drafts)
        return self._found

    def _differs(self, kind: str, expected: Any, got: Any, rule: str) -> bool:
        if expected == got:
            return False
        self._found.append(Mismatch(kind, expected, got, rule))
        return True

    def _start_over(self, target_kv: int) -> None:
        self.machine = RequestAlignment(len(self.ids), k=self.served.k)
        self.machine.admit(min(target_kv, len(self.ids) - 1))
        self._context_written = self.machine.lengths.drafter_context
        self._lost = False

    # The target forward

    def _expect_start(self, seen: Seen) -> None:
        start = seen.positions[0]
        if self._lost:
            self._start_over(start)
        for sentence in self.machine.differences(target_kv=start):
            self._differs("target_kv", self.machine.lengths.target_kv, start, sentence)
            self._start_over(start)
        expected = list(range(start, start + len(seen.positions)))
        self._differs("positions", expected, list(seen.positions), "rows of a forward lie at successive positions")

    def _forward(self, seen: Seen) -> Forward | None:
        start, known, proposals = self.machine.lengths.target_kv, seen.known, seen.proposed
        expected = self.ids[start : start + known]
        self._differs("input_ids", expected, list(seen.ids[:known]), "the target reads the committed tokens")
        if proposals:
            rule = "what is verified are the first of the tokens drafted last"
            self._differs("proposals", list(self.drafts[: len(proposals)]), list(proposals), rule)
        try:
            if not proposals:
                return self.machine.prefill(known)
            self.machine.draft(proposals)
            forward = self.machine.verify()
        except (TransitionError, BadInput) as error:
            self._differs("step", "a step that the rules allow", {"rows": known, "proposals": proposals}, str(error))
            return None
        rows = known + len(proposals)
        if self._differs("rows", forward.rows, rows, "a verify forward has the anchor and the proposals"):
            self.machine.rollback()
            return None
        return forward

    # Acceptance

    def _commit(self, forward: Forward, seen: Seen) -> Commit | None:
        """The end of the forward, or None where the engine did what the machine has no word for."""
        emitted = () if seen.emitted is None else tuple(seen.emitted)
        rule = "a forward emits if it ends with the newest token or a proposal"
        self._differs("samples", forward.samples, seen.emitted is not None, rule)
        if not forward.samples:
            return self.machine.commit()
        if seen.choices is not None:
            self._expect_greedy(seen.proposed, tuple(seen.choices[: forward.proposals + 1]), emitted)
        else:
            self._expect_sampled(seen.proposed, emitted, seen)
        vocab = self.served.vocab_size
        outside = [token for token in emitted if not 0 <= token < vocab]
        self._differs("emitted", [], outside, "an emitted token is an id of the target's vocabulary")
        self.ids += emitted
        return self.machine.commit(min(len(emitted) - 1, forward.proposals)) if emitted else None

    def _expect_greedy(self, proposals: tuple[int, ...], choices: tuple[int, ...], emitted: tuple[int, ...]) -> None:
        expected, accepted = verify_greedy_block(proposals, choices)
        rule = "accepted are the proposals up to the first that is not the target's choice"
        self._differs("accepted", accepted, len(emitted) - 1, rule)
        self._differs("emitted", expected, list(emitted), "emitted are the accepted and the target's own next token")

    def _expect_sampled(self, proposals: tuple[int, ...], emitted: tuple[int, ...], seen: Seen) -> None:
        accepted, drafted = len(emitted) - 1, len(proposals)
        if not 0 <= accepted <= drafted:
            self._differs("accepted", f"0 to {drafted}", accepted, "a round emits one to K + 1 tokens")
            return
        rule = "emitted tokens begin with the accepted proposals"
        self._differs("emitted", list(proposals[:accepted]), list(emitted[:accepted]), rule)
        barred = [token for token, allowed in zip(emitted, seen.allowed, strict=False) if not allowed]
        self._differs("support", [], barred, "the target's rules must leave an emitted token a chance")
        if seen.q is not None:
            never = [token for token, q in zip(proposals, seen.q, strict=False) if not q > 0]
            self._differs("q", [], never, "a proposal has a chance in the distribution it was drawn from")
        if accepted == drafted:
            return
        if seen.q is None:
            rule = "with a one-hot q the token that replaces a proposal is another one"
            self._differs("correction", True, emitted[accepted] != proposals[accepted], rule)
        elif seen.correction is not None:
            p, q = seen.correction
            self._differs("correction", True, p + ROUNDING >= q, f"a correction has p > q, but p = {p:g}, q = {q:g}")

    # The drafter

    def _expect_drafting(self, commit: Commit, drafting: Drafting) -> None:
        kept = len(commit.keep_rows)
        rule = "rows 0 to the last accepted of the forward are kept, the others dropped"
        self._differs("rows_kept", kept, drafting.kept, rule)
        expected = list(commit.context_positions)
        rule = "the drafter's context grows by the kept rows, at their own positions"
        self._differs("context_positions", expected, list(drafting.positions[: drafting.kept]), rule)
        unwritten = commit.before.drafter_context - self._context_written
        self._differs("context_hole", 0, unwritten, "no context row is read that the drafter has not written")
        self._context_written = commit.after.drafter_context
        for sentence in self.machine.differences(drafter_context=drafting.context):
            self._differs("drafter_context", commit.after.drafter_context, drafting.context, sentence)
        written, by_table = drafting.slots
        self._differs("context_slots", list(by_table), list(written), "context rows lie where the block table has them")
        # A block drafted amid a prompt is void, whatever its anchor.
        if self.machine.phase is Phase.READY and drafting.block_ids:
            self._expect_block(commit.after.drafter_context, drafting)

    def _expect_block(self, anchor: int, drafting: Drafting) -> None:
        served, last = self.served, self.served.limit
        expected = [place if last is None else min(place, last - 1) for place in self.machine.block().positions]
        rule = f"a block has the anchor at n - 1 and {served.k} mask rows after it, always"
        self._differs("block_positions", expected, list(drafting.block_positions), rule)
        ids = [self.ids[anchor], *[served.mask_token_id] * served.k]
        self._differs("block_ids", ids, list(drafting.block_ids), "a block is the newest token and K mask tokens")

    def _expect_drafts(self, drafts: Sequence[int]) -> None:
        self.drafts = tuple(drafts)
        rule = f"{len(drafts)} tokens drafted, K is {self.served.k}"
        self._differs("drafted", True, len(drafts) <= self.served.k, rule)
        outside = [token for token in drafts if not 0 <= token < self.served.vocab_size]
        self._differs("drafted", [], outside, "a draft is an id of the target's vocabulary")
        # A drafter may choose the mask id here and there, though none that is trained does; not all along a block.
        due = self.machine.phase is Phase.READY and len(drafts) > 1
        left = due and set(drafts) == {self.served.mask_token_id}
        self._differs("mask_left", False, left, "after drafting no block still holds its mask tokens")


@dataclass
class Counts:
    """What a process has audited. A round is a request's step that emits.

    ``verified``: rounds with a proposal; ``padded``: rounds that the engine filled up; ``chunks``: steps that emit
    nothing; ``blocks``: blocks drafted; ``unaudited``: requests that could not be followed. ``proposed``, ``accepted``
    and ``emitted`` are tokens.
    """

    rounds: int = 0
    verified: int = 0
    padded: int = 0
    chunks: int = 0
    requests: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    blocks: int = 0
    unaudited: int = 0
    mismatches: Counter[str] = field(default_factory=Counter)

    def add(self, seen: Seen) -> None:
        """Count one step of one request."""
        self.blocks += bool(seen.drafting and seen.drafting.block_ids)
        if seen.emitted is None:
            self.chunks += 1
            return
        self.rounds += 1
        self.verified += bool(seen.proposed)
        self.padded += len(seen.proposed) < seen.proposals
        self.proposed += len(seen.proposed)
        self.accepted += len(seen.emitted) - 1
        self.emitted += len(seen.emitted)


class Report:
    """Where mismatches and counts go: ``logger`` and one file, which only this process writes to."""

    def __init__(self, path: Path, logger: logging.Logger, suffix: str = "") -> None:
        self.counts, self._logger = Counts(), logger
        self.path, self._file = _opened(path.with_name(path.name + suffix), logger)
        self._summary_at = self._file.tell()
        atexit.register(self.close)
        self._logger.info("dflash-plugins: every round is audited, mismatches and counts go to %s", self.path)
        self.flush()

    def step(self, request: str, audit: RequestAudit, seen: Seen) -> None:
        """Compare one step of one request and write down what differs."""
        self.counts.add(seen)
        for found in audit.round(seen):
            self.mismatch(request, audit.rounds, found)

    def block(self, request: str, audit: RequestAudit, drafting: Drafting, drafts: Sequence[int]) -> None:
        """Compare a block drafted at the beginning of a round and write down what differs."""
        self.counts.blocks += 1
        for found in audit.block(drafting, drafts):
            self.mismatch(request, audit.rounds + 1, found)

    def mismatch(self, request: str, number: int, found: Mismatch) -> None:
        """Count it; log and write it, unless its kind has filled the log or the file."""
        self.counts.mismatches[found.kind] += 1
        seen_before = self.counts.mismatches[found.kind]
        if seen_before <= LOGGED_PER_KIND:
            self._logger.error(
                "dflash-plugins: audit, request %s, round %d, %s: expected %s, got %s; %s",
                request, number, found.kind, found.expected, found.got, found.rule,
            )  # fmt: skip
        if seen_before == LOGGED_PER_KIND:
            self._logger.error("dflash-plugins: audit, more of %s is only counted", found.kind)
        if seen_before <= WRITTEN_PER_KIND:
            what = {"kind": found.kind, "rule": found.rule}
            line = {"round": number, "request": request, "what": what, "expected": found.expected, "got": found.got}
            self._write(line)
            self._summary_at = self._file.tell()

    def flush(self) -> None:
        """Write the counts so far over the last ones."""
        self._file.seek(self._summary_at)
        self._write({"summary": vars(self.counts) | {"pid": os.getpid()}})
        self._file.flush()

    def close(self) -> None:
        """Write the counts and let go of the file. May be called twice."""
        atexit.unregister(self.close)
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        # Over the summary, which is the last line and never longer than what comes after it.
        self._file.seek(self._summary_at)
        self._file.truncate()
        self._file.write(json.dumps(line) + "\n")


def _opened(path: Path, logger: logging.Logger) -> tuple[Path, IO[str]]:
    """The file at its end, ours alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        own = path.with_name(f"{path.name}.pid{os.getpid()}")
        logger.warning("dflash-plugins: another process writes to %s, this one to %s", path, own)
        path, file = own, own.open("a+", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.seek(0, os.SEEK_END)
    return path, file


def read(path: Path) -> tuple[Counts, list[dict[str, Any]]]:
    """Counts and mismatches of FILE and of the files of other ranks and processes beside it.

    Raises BadInput where there is none, or where an audit could not be installed.
    """
    total, lines = Counts(), []
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    files = sorted(file for file in beside if file.name == path.name or file.name.startswith(f"{path.name}."))
    if not files:
        raise BadInput(f"no audit has been written to {path}")
    for line in (json.loads(text) for file in files for text in file.read_text(encoding="utf-8").splitlines()):
        if "refused" in line:
            raise BadInput(f"{path}: {line['refused']}")
        if "summary" not in line:
            lines.append(line)
            continue
        for name in vars(total):
            vars(total)[name] += Counter(line["summary"][name]) if name == "mismatches" else line["summary"][name]
    return total, lines


def rank_suffix() -> str:
    """What tells this rank's file from the others'; empty for a process that is alone."""
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return "" if alone else f".rank{torch.distributed.get_rank()}"


def choices(logits: Tensor, emitted: Tensor) -> tuple[list[int], list[bool]]:
    """Per row of logits [N, V]: the choice, which is the emitted id [N] if that ties, and whether that has a chance."""
    of_emitted = logits.gather(1, emitted[:, None])[:, 0]
    best = logits.max(dim=1)
    choice = torch.where(of_emitted == best.values, emitted, best.indices)
    return choice.tolist(), (of_emitted > -torch.inf).tolist()


def requested(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file to write to, or None where no audit is asked for."""
    name = audit_file(environment)
    return None if name is None else Path(name)


def refuse(reasons: str, logger: logging.Logger) -> NoReturn:
    """Say in the log, in the file and to whoever starts the engine that the audit cannot be had: AuditRefused."""
    sentence = f"{AUDIT} is set, but the audit cannot be installed: {reasons}"
    logger.error("dflash-plugins: %s", sentence)
    path = requested()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"refused": sentence, "pid": os.getpid()}) + "\n")
    raise AuditRefused(sentence)
