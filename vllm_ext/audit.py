"""The audit of vLLM: ``dflash_plugins.audit`` says what a round is compared with; here it gets into a runner.

``audit_v1`` and ``audit_v2`` observe the engine's runners and hand over one ``Seen`` per request and step.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from dflash_plugins.audit import AuditRefused, Report, refuse, requested
from dflash_plugins.hooks import Patches, drift
from dflash_plugins.switches import AUDIT
from vllm_ext.hooks import AT_AUDIT_V1, AT_AUDIT_V2

# A child of vLLM's own logger, so that lines reach whatever handler and level the server was given.
logger = logging.getLogger("vllm.dflash_plugins")

_patches = Patches()
_report: Report | None = None


def report(suffix: str = "") -> Report:
    """The one report of this process, opened at the first use; AuditRefused where no audit is asked for."""
    global _report
    if _report is None:
        path = requested()
        if path is None:
            raise AuditRefused(f"{AUDIT} is not set any more")
        _report = Report(path, logger, suffix)
    return _report


def install(vllm_config: Any, *, v2: bool) -> None:
    """Wrap what the audit observes in this process's runner. AuditRefused, which keeps the engine from starting."""
    sentences = drift(AT_AUDIT_V2 if v2 else AT_AUDIT_V1) if not _patches.done else []
    if sentences:
        refuse(f"vLLM has changed: {'; '.join(sentences)}", logger)
    try:
        watching = importlib.import_module("vllm_ext.audit_v2" if v2 else "vllm_ext.audit_v1")
        sentences = watching.refusals(vllm_config)
        if not _patches.done and not sentences:
            watching.wrap(_patches)
    except Exception as error:
        _patches.undo()
        sentences = [f"wrapping failed: {error}"]
    if sentences:
        refuse("; ".join(sentences), logger)


def undo() -> list[str]:
    """Unwrap everything and close the report; a sentence for each place that somebody else holds now."""
    global _report
    if _report is not None:
        _report.close()
        _report = None
    return _patches.undo()
