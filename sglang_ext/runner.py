"""How the suite's drafting gets into SGLang: just before the engine builds what drafts, and only where a run asks."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from dflash_plugins.hooks import Patches, drift, refuse_drift
from dflash_plugins.switches import AUDIT, audit_file
from sglang_ext.features import refused_rules
from sglang_ext.hooks import AT_WORKER, ON_CPU
from sglang_ext.serving import Served, served

logger = logging.getLogger("sglang.dflash_plugins")

_patches = Patches()


def undo() -> list[str]:
    """Put back everything that has been replaced; a sentence for each place that somebody else holds now."""
    return _patches.undo()


def prepare(worker: type, server_args: Any) -> type:
    """The class that drafts in this run, called just before the engine builds it: ``worker``, or our subclass of it.

    Raises ``Refused`` as ``serving.served``, and DFlashPluginsError where the engine is not as we know it.
    """
    serving = served(server_args, warn=False)
    if serving is None:
        if audit_file(os.environ):
            logger.warning("dflash-plugins: %s is set, but SGLang drafts by itself here: nothing to audit", AUDIT)
        return _verifying(worker)
    refuse_drift("SGLang", (*AT_WORKER, *(ON_CPU if serving.on_cpu else ())))
    _register_drafter(serving)
    _refuse_half_applied_rules()
    if serving.on_cpu:
        from sglang_ext import cpu

        cpu.prepare(_patches)
    if audit_file(os.environ):
        from sglang_ext import audit

        audit.require()
        return audit.AuditedWorker
    from sglang_ext.proposer import DFlashPluginsWorker

    return DFlashPluginsWorker


def _verifying(worker: type) -> type:
    """Where SGLang drafts by itself: ``worker``, or one that has the core verify what SGLang has no kernel for."""
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    if is_dflash_sampling_verify_available():
        return worker
    sentences = drift(AT_WORKER)
    if sentences:
        logger.error("dflash-plugins: sampled requests are left to SGLang, which has changed: %s", "; ".join(sentences))
        return worker
    from sglang_ext.proposer import VerifyingWorker

    _refuse_half_applied_rules()
    logger.info("dflash-plugins: sampled requests are verified by the core, SGLang has no kernel for them here")
    return VerifyingWorker


def _register_drafter(serving: Served) -> None:
    from sglang.srt.models.registry import ModelRegistry

    from sglang_ext.dflash import DFlashPluginsDraftModel

    architecture, label = serving.draft.architecture, "ModelRegistry.models"
    DFlashPluginsDraftModel.serving = serving
    if architecture in ModelRegistry.models:
        _patches.item(label, ModelRegistry.models, architecture, DFlashPluginsDraftModel)
    else:
        ModelRegistry.models[architecture] = DFlashPluginsDraftModel
        _patches.added(label, ModelRegistry.models, architecture)


def _refuse_half_applied_rules() -> None:
    from sglang.srt.managers import scheduler

    shipped = scheduler.validate_dflash_request

    @functools.wraps(shipped)
    def validate(req: Any, enable_overlap: bool) -> str | None:
        return shipped(req, enable_overlap) or refused_rules(req)

    _patches.attribute(scheduler, "validate_dflash_request", validate)
