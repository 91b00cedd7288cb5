"""What SGLang is asked to serve, read by the core: whether our worker has to draft, and whether it can.

Used twice in a run: where the engine reads its arguments, so that a pair is refused with all reasons before anything
loads, and in the scheduler's process, which builds the drafter.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.check import PairReport, inspect_pair, units_findings
from dflash_plugins.config import DraftConfig, DraftReading, read_draft_config
from dflash_plugins.errors import refuse_or_warn
from dflash_plugins.findings import Finding, errors
from dflash_plugins.hub import Model
from dflash_plugins.pair import loop_mode_finding, served_prefix_lengths
from sglang_ext.features import feature_findings

logger = logging.getLogger("sglang.dflash_plugins")

TOKENS_FLAG = "speculative_num_draft_tokens"


@dataclass(frozen=True)
class Served:
    """A drafter that our worker serves. ``k`` counts proposals.

    For the log, ``reasons`` say why it is ours, and ``models`` are target and drafter as the engine was told of them.
    """

    draft: DraftConfig
    k: int
    prefix_lengths: tuple[int, ...]
    reasons: tuple[str, ...]
    on_cpu: bool
    models: tuple[Model, Model]


def served(server_args: Any, *, warn: bool) -> Served | None:
    """The drafter of this run if our worker is to draft; None for a run that the engine serves by itself.

    Raises ``Refused`` with every error at once; warnings are logged if ``warn``.
    """
    settings = settings_of(server_args)
    if settings.speculative_draft_model_path is None:
        return None  # the engine says so better
    on_cpu = str(settings.device).startswith("cpu")
    directory = _local(
        settings.speculative_draft_model_path, settings.speculative_draft_model_revision, "*.safetensors"
    )
    reading = read_draft_config(directory)
    reasons = _reasons(reading, on_cpu)
    if not reasons:
        return None
    target = _local(settings.model_path, settings.revision)
    given = settings.speculative_num_draft_tokens or settings.speculative_dflash_block_size
    k = None if given is None else int(given) - 1
    report = inspect_pair(directory, target, k=k, served_dtype=str(settings.dtype))
    found = [*report.findings, *feature_findings(settings, on_cpu), *_our_findings(report, given)]
    refuse_or_warn(report.subject, found if warn else errors(found), logger)
    draft = reading.require()
    k = draft.k if k is None else k
    prefix_lengths, _ = served_prefix_lengths(draft, k)
    models = (
        Model.told(str(settings.model_path), settings.revision, target),
        Model.told(str(settings.speculative_draft_model_path), settings.speculative_draft_model_revision, directory),
    )
    return Served(draft, k, prefix_lengths, reasons, on_cpu, models)


def settings_of(server_args: Any) -> Any:
    """The engine's arguments, with what it has decided so far."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _reasons(reading: DraftReading, on_cpu: bool) -> tuple[str, ...]:
    """Why our worker drafts: what SGLang by itself lacks or would leave out without a word."""
    found = ["SGLang's own worker does not draft on a CPU"] if on_cpu else []
    config = reading.config
    if config is None:
        return tuple(found)
    if config.loop is not None:
        found.append(f"D-Loop ({config.loop.mode})")
    if config.input_embedding_scale != 1.0:
        found.append("input_embedding_scale, which SGLang does not read")
    if config.draft_vocab_size not in (None, config.vocab_size):
        found.append("a head of its own with an id map, which SGLang does not read")
    by_kind = tuple(window is not None for window in config.windows)
    if reading.origins.get("causal") == "dflash_config.causal" and config.causal != by_kind:
        found.append("dflash_config.causal, which SGLang does not read")
    return tuple(found)


def _our_findings(report: PairReport, given: int | None) -> list[Finding]:
    config = report.draft
    if config is None:
        return []
    found = units_findings("sglang", config, None, {} if given is None else {TOKENS_FLAG: given})
    if config.loop is not None and config.loop.mode != "refine":
        found.append(loop_mode_finding(config.loop.mode))
    if report.own_embedding:
        message = "SGLang embeds the block with the target's embedding and has no place for another"
        mend = "export the drafter without embed_tokens, if it is the target's; else serve it with vLLM"
        found.append(Finding.error("own-embedding", "embed_tokens.weight", "stored", message, mend))
    return found


def _local(path: str, revision: str | None, *more: str) -> Path:
    """A folder with the JSON files of a model (and ``more``): itself, or from the hub as the engine takes it."""
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", *more]))


@contextlib.contextmanager
def platform_admitted(server_args: Any) -> Iterator[None]:
    """Let the engine read DFLASH's arguments on a CPU, where it would refuse the platform."""
    if not str(settings_of(server_args).device).startswith("cpu"):
        yield
        return
    from sglang_ext.cpu import admitted

    with admitted():
        yield
