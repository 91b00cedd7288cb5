"""One report on a pair: configuration, checkpoint, target, engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.checkpoint import (
    Accounting,
    account,
    directory_of,
    extra_file_findings,
    id_map_findings,
    read_header,
)
from dflash_plugins.config import DraftConfig, DraftReading, TargetConfig, read_draft_config, read_target_config
from dflash_plugins.engines import Launch, engine_facts, engine_findings
from dflash_plugins.errors import Refused
from dflash_plugins.findings import Finding, Severity, errors
from dflash_plugins.pair import (
    k_findings,
    pair_findings,
    read_tokenizer_vocabulary,
    served_prefix_lengths,
    serving_dtype_findings,
    tokenizer_findings,
)


@dataclass(frozen=True)
class PairReport:
    """Everything found about a pair, errors first; ``draft`` is None when its configuration is not usable."""

    subject: str
    findings: tuple[Finding, ...]
    draft: DraftConfig | None
    target: TargetConfig | None
    dtype: str | None
    own_embedding: bool

    def require(self) -> DraftConfig:
        """The drafter's description; ``Refused`` with all findings when any of them is an error."""
        if self.draft is None or errors(self.findings):
            raise Refused(self.subject, self.findings)
        return self.draft


def inspect_pair(
    draft_path: Path | str,
    target_path: Path | str | None = None,
    *,
    k: int | None = None,
    engine: str | None = None,
    launch: Launch | None = None,
    served_dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> PairReport:
    """Read both sides and say everything at once. No engine has to be installed.

    ``k`` counts proposals; ``settings`` are engine flags with underscores; ``launch`` says where it is to run.
    ``BadInput`` is raised for paths and files that cannot be read at all.
    """
    reading = read_draft_config(draft_path)
    target = None if target_path is None else read_target_config(target_path)
    accounting = account(reading.facts, read_header(directory_of(draft_path)))
    found = [*reading.findings, *accounting.findings, *_file_findings(draft_path, reading, accounting)]
    if target is not None and target_path is not None:
        found += pair_findings(reading.facts, target, own_embedding=accounting.own_embedding)
        found += _tokenizers(directory_of(draft_path), directory_of(target_path))
    found += serving_dtype_findings(accounting.dtype, served_dtype)
    if reading.config is not None:
        found += _served(reading, reading.config, k, engine, launch or Launch(), settings or {})
    subject = f"drafter {draft_path}" + ("" if target_path is None else f" for target {target_path}")
    return PairReport(subject, _ordered(found), reading.config, target, accounting.dtype, accounting.own_embedding)


def check_pair(draft_path: Path | str, target_path: Path | str | None = None, **options: Any) -> tuple[Finding, ...]:
    """The findings of ``inspect_pair``, errors first."""
    return inspect_pair(draft_path, target_path, **options).findings


def _file_findings(path: Path | str, reading: DraftReading, accounting: Accounting) -> list[Finding]:
    found = extra_file_findings(directory_of(path))
    vocab = reading.facts.get("vocab_size")
    if vocab is not None and not errors(accounting.findings):
        found += id_map_findings(directory_of(path), accounting, vocab)
    return found


def _tokenizers(draft: Path, target: Path) -> list[Finding]:
    ours, theirs = read_tokenizer_vocabulary(target), read_tokenizer_vocabulary(draft)
    return [] if ours is None or theirs is None else tokenizer_findings(ours, theirs)


def _served(
    reading: DraftReading,
    config: DraftConfig,
    k: int | None,
    engine: str | None,
    launch: Launch,
    settings: Mapping[str, Any],
) -> list[Finding]:
    found = k_findings(config, k)
    found += served_prefix_lengths(config, config.k if k is None else k)[1]
    if engine is not None:
        found += engine_findings(engine, config, launch, reading.origins)
        found += units_findings(engine, config, k, settings)
    return found


def units_findings(engine: str, config: DraftConfig, k: int | None, settings: Mapping[str, Any]) -> list[Finding]:
    """A token flag that disagrees with K, or looks like the other engine's (vLLM counts K, SGLang K + 1)."""
    facts = engine_facts(engine)
    flag = facts.tokens_flag
    if flag not in settings:
        return []
    value = int(settings[flag])
    if k is not None and value != facts.tokens(k):
        message = f"disagrees with K = {k}, which {facts.title} spells {facts.tokens(k)}"
        return [Finding.error("units-conflict", flag, value, message, "give one of the two")]
    trained = facts.tokens(config.k)
    other = config.k + 1 - facts.tokens_beyond_k
    if value == other:
        message = f"is what another engine calls a block of {config.block_size}; {facts.title} counts differently"
        return [Finding.of(Severity.WARNING, "units-other-engine", flag, value, message, f"did you mean {trained}?")]
    return []


def _ordered(found: list[Finding]) -> tuple[Finding, ...]:
    """Errors, warnings, informations; the same thing said by two checks is said once."""
    rank = list(Severity)
    once: dict[tuple[str, str, str], Finding] = {}
    for finding in found:
        once.setdefault((finding.code, finding.key, str(finding.value)), finding)
    return tuple(sorted(once.values(), key=lambda f: rank.index(f.severity)))
