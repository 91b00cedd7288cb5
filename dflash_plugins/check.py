"""One report on a pair: configuration, checkpoint, target, engine, planned launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from dflash_plugins.config_target import read_generation_config
from dflash_plugins.engines import EngineFacts, Launch, engine_facts, foreign_architecture
from dflash_plugins.engines.limits import limit_findings
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import Finding, Severity, errors
from dflash_plugins.headers import Header, headers_only, stored_bytes
from dflash_plugins.memory import MEMORY
from dflash_plugins.pair import DTYPES, PAIR, PROPOSALS, TOKENIZERS, read_tokenizer_vocabulary
from dflash_plugins.rules import Facts, run
from dflash_plugins.served import SERVED, count_findings, loop_findings, units_findings
from dflash_plugins.settings import read_settings

__all__ = ["PairReport", "check_pair", "inspect_pair", "units_findings"]


@dataclass(frozen=True)
class PairReport:
    """Everything found about a pair, errors first; ``draft`` is None when its configuration is not usable.

    ``alone``: neither core nor plugin computes this drafter, and the engine was seen to serve it by itself.
    """

    subject: str
    findings: tuple[Finding, ...]
    draft: DraftConfig | None
    target: TargetConfig | None
    dtype: str | None
    own_embedding: bool
    alone: bool = False
    block_size: int | None = None

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

    ``k`` counts proposals; ``settings`` are engine flags with underscores; ``launch`` says where it is to run. Memory
    is looked at where both are given. ``BadInput`` is raised for paths and files that cannot be read at all.
    """
    reading = read_draft_config(draft_path)
    known = None if engine is None else engine_facts(engine)
    flags, found = ({}, []) if known is None else read_settings(known, settings or {})
    header = read_header(directory_of(draft_path))
    sinks = {"attention_sinks": True} if "sinks" in reading.said else {}
    accounting = account({**reading.facts, **sinks}, header)
    own, alone = _own_findings(draft_path, reading, accounting, known, launch or Launch())
    found += own
    target, target_found = _target(target_path)
    found += target_found
    facts = Facts(
        draft=reading.facts,
        config=reading.config,
        origins=reading.origins,
        said=reading.said,  # type: ignore[arg-type]
        own_embedding=accounting.own_embedding,
        dtype=accounting.dtype,
        draft_bytes=stored_bytes(header),
        target=target,
        engine=known,
        launch=launch or Launch(),
        settings=flags,
        served_dtype=served_dtype or flags.get("dtype", (None, None))[1],
        k=k,
        **_target_files(draft_path, target_path, flags),
    )
    found += _run(facts, memory=settings is not None and launch is not None)
    subject = f"drafter {draft_path}" + ("" if target_path is None else f" for target {target_path}")
    ordered = _ordered(found)
    stored = (accounting.dtype, accounting.own_embedding)
    return PairReport(subject, ordered, reading.config, target, *stored, alone, reading.facts.get("block_size"))


def check_pair(draft_path: Path | str, target_path: Path | str | None = None, **options: Any) -> tuple[Finding, ...]:
    """The findings of ``inspect_pair``, errors first."""
    return inspect_pair(draft_path, target_path, **options).findings


def _run(facts: Facts, *, memory: bool) -> list[Finding]:
    found = run((*PAIR, *TOKENIZERS, *DTYPES, *PROPOSALS), facts)
    found += [*loop_findings(facts), *limit_findings(facts), *count_findings(facts)]
    return found + run((*SERVED, *(MEMORY if memory else ())), facts)


def _own_findings(
    path: Path | str, reading: DraftReading, accounting: Accounting, engine: EngineFacts | None, launch: Launch
) -> tuple[list[Finding], bool]:
    """What is wrong with the drafter by itself; and whether the engine serves it where we do not."""
    if _served_foreign(reading, engine, launch):
        kept = [f for f in reading.findings if f.code in ("architecture-foreign", *_FOR_ALL)]
        return [_by_engine(f, engine) if f.code == "architecture-foreign" else f for f in kept], True
    directory = directory_of(path)
    found = [*reading.findings, *accounting.findings, *extra_file_findings(directory)]
    vocab = reading.facts.get("vocab_size")
    if vocab is not None and not errors(accounting.findings):
        found += id_map_findings(directory, accounting, vocab)
    if headers_only(directory):
        message = "holds only the headers of the tensors, so that nothing can be loaded from it"
        found.append(
            Finding.of(Severity.INFO, "headers-only", "safetensors", None, message, "nothing to mend for a check")
        )
    computes = {} if engine is None or launch.platform == "cpu" else engine.computes
    said = [_by_engine(f, engine) if _computed(f, computes) else f for f in found]
    return said, any(_computed(f, computes) for f in found)


_FOR_ALL = ("mask-token-range", "mask-token-null", "mask-token-shared", "target-layer-range", "target-layer-repeated")


def _served_foreign(reading: DraftReading, engine: EngineFacts | None, launch: Launch) -> bool:
    """Whether the engine serves this architecture, which is not ours, under the method of our drafters."""
    names = [f.value for f in reading.findings if f.code == "architecture-foreign"]
    foreign = foreign_architecture(str(names[0])) if names else None
    served = foreign is not None and foreign.same_method and engine is not None
    return served and engine is not None and engine.engine in (foreign.served_by if foreign else ())


def _computed(finding: Finding, computes: Mapping[str, str]) -> bool:
    return finding.code == "config-unsupported" and finding.key.rpartition(".")[2] in computes


def _by_engine(finding: Finding, engine: EngineFacts | None) -> Finding:
    """The same as a warning: not ours, but the engine was seen to do it."""
    title = "the engine" if engine is None else engine.title
    message = f"{finding.message.removesuffix(', which we do not compute')}; {title} serves it by itself"
    mend = "serve it without our plugin; neither its drafts nor its text have been compared with ours"
    return finding.model_copy(update={"severity": Severity.WARNING, "message": message, "mend": mend})


def _target(path: Path | str | None) -> tuple[TargetConfig | None, tuple[Finding, ...]]:
    if path is None:
        return None, ()
    try:
        return read_target_config(path), ()
    except Refused as error:
        return None, error.findings


def _target_files(draft: Path | str, target: Path | str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Facts from what lies beside the target's config.json: tensors, tokenizer, generation defaults."""
    if target is None:
        return {}
    theirs, ours = directory_of(target), directory_of(draft)
    header = _header_if_any(theirs)
    found: dict[str, Any] = {"generation": _generation(theirs, flags), "target_header": header}
    found["target_bytes"] = None if header is None else stored_bytes(header)
    if vocabulary := read_tokenizer_vocabulary(ours):
        found |= {"draft_vocabulary": vocabulary, "target_vocabulary": read_tokenizer_vocabulary(theirs)}
    return found


def _generation(target: Path, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    override = flags.get("override_generation_config", (None, None))[1]
    return read_generation_config(target) | (override if isinstance(override, dict) else {})


def _header_if_any(directory: Path) -> Header | None:
    """A target may come in another format: then nothing is known of its tensors."""
    try:
        return read_header(directory)
    except BadInput:
        if any(directory.glob("*.safetensors*")):
            raise
        return None


def _ordered(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, warnings, informations; the same thing said by two checks is said once."""
    rank = list(Severity)
    once: dict[tuple[str, str, str], Finding] = {}
    for finding in sorted(found, key=lambda f: rank.index(f.severity)):
        once.setdefault((finding.code, _place(finding), str(finding.value)), finding)
    return tuple(once.values())


def _place(finding: Finding) -> str:
    """Of a key of config.json its name, since checks differ in the path to it; of a tensor all of it."""
    return finding.key if finding.code.startswith("tensor-") else finding.key.rpartition(".")[2]
