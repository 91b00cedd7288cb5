"""How the suite's drafting gets into the engine's runners: at the last moment, and only where a run asks for it.

At registration two methods of ``VllmConfig`` are wrapped, which costs nothing. One lets DFlash 2 pass where the V1
runner refuses it. The other is the one call that every worker makes with its config before it imports its runner;
there the name of the runner's own drafting class is exchanged, if this run drafts with an architecture of ours.
Workers in processes of their own make that call before they load plugins: there their constructor is wrapped, too.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from dflash_plugins.hooks import Patches, drift
from dflash_plugins.switches import AUDIT, audit_file
from vllm_ext.hooks import AT_RUNNER_V1, AT_RUNNER_V2

logger = logging.getLogger("vllm.dflash_plugins")

DRAFTER_CLASS = "vllm_ext.dflash:DFlashPluginsDraftModel"
DFLASH = "DFlashDraftModel"
DFLASH2 = "DFlash2DraftModel"
# vLLM puts DFlash before names that neither begin nor end with it; both are ours.
DLOOP = ("DLoopDraftModel", "DFlashDLoopDraftModel")
# The entry of the engine's list of what its V1 runner lacks that we provide.
CANDIDATE_HEAD = "DFlash candidate-head drafts"

_patches = Patches()
_sentences: list[str] = []


def draft_architectures(vllm_config: Any) -> frozenset[str]:
    """Architectures of the drafter that this config decodes with by method ``dflash``; none without one."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method != "dflash" or speculation.draft_model_config is None:
        return frozenset()
    return frozenset(speculation.draft_model_config.architectures or ())


def drafts_here(architectures: frozenset[str], *, v2: bool) -> bool:
    """Whether the runner needs our drafting: any D-Loop, and DFlash 2 where the engine has none."""
    return bool(architectures.intersection(DLOOP)) or (DFLASH2 in architectures and not v2)


def is_ours(architectures: frozenset[str]) -> bool:
    """Whether the drafter is one whose rounds the audit follows, whoever drafts them."""
    return bool(architectures.intersection({DFLASH, DFLASH2, *DLOOP}))


def without_refusal(shipped: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """The engine's list of what its V1 runner lacks, less the head of DFlash 2, which our proposer has."""

    @functools.wraps(shipped)
    def unsupported(vllm_config: Any) -> list[str]:
        lacking = shipped(vllm_config)
        if DFLASH2 not in draft_architectures(vllm_config):
            return lacking
        return [feature for feature in lacking if feature != CANDIDATE_HEAD]

    return unsupported


def before_the_runner(shipped: Callable[[Any], None]) -> Callable[[Any], None]:
    """The engine's first call of a worker with its config, and then ``prepare``."""

    @functools.wraps(shipped)
    def first_call(vllm_config: Any) -> None:
        shipped(vllm_config)
        prepare(vllm_config)

    return first_call


def before_a_worker(shipped: Callable[..., None]) -> Callable[..., None]:
    """``prepare``, and then the engine's constructor of workers."""

    @functools.wraps(shipped)
    def constructor(worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        prepare(vllm_config)
        shipped(worker, vllm_config, *args, **kwargs)

    return constructor


def prepare(vllm_config: Any) -> None:
    """Exchange what this worker's runner needs for this config; what cannot be is logged and kept for the refusal."""
    undo()
    v2 = bool(vllm_config.use_v2_model_runner)
    if audit_file(os.environ):
        _audit(vllm_config, v2=v2)
    if not drafts_here(draft_architectures(vllm_config), v2=v2):
        return
    _sentences.extend(drift(AT_RUNNER_V2 if v2 else AT_RUNNER_V1))
    if _sentences:
        logger.error("dflash-plugins: the runner is left as it is, vLLM has changed: %s", "; ".join(_sentences))
        return
    try:
        (_install_v2 if v2 else _install_v1)()
    except Exception as error:
        undo()
        _sentences.append(f"installing failed: {error}")
        logger.exception("dflash-plugins: the runner is left as it is")


def _audit(vllm_config: Any, *, v2: bool) -> None:
    """Raises AuditRefused where the audit was asked for and cannot be had: the run does not go on without it."""
    if not is_ours(draft_architectures(vllm_config)):
        logger.warning("dflash-plugins: %s is set, but this run drafts with none of ours: nothing to audit", AUDIT)
        return
    from vllm_ext import audit

    audit.install(vllm_config, v2=v2)


def undo_audit() -> list[str]:
    """Take the audit out again, if it was ever installed in this process; a sentence for each place held by others."""
    audit = sys.modules.get("vllm_ext.audit")
    return [] if audit is None else audit.undo()


def _install_v1() -> None:
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.worker import gpu_model_runner

    from vllm_ext.proposer import DFlashPluginsProposer

    _patches.attribute(gpu_model_runner, "DFlashProposer", DFlashPluginsProposer)
    # On GPUs the engine's own class stays registered for its V2 runner; this run is not one of those.
    serve_with_our_class(_patches, ModelRegistry, DFLASH2)


def _install_v2() -> None:
    from vllm.v1.worker.gpu import model_runner, spec_decode

    from vllm_ext.speculator import wrapped_init_speculator

    wrapped = wrapped_init_speculator(spec_decode.init_speculator)
    _patches.attribute(spec_decode, "init_speculator", wrapped)
    _patches.attribute(model_runner, "init_speculator", wrapped)


def serve_with_our_class(patches: Patches, registry: Any, architecture: str) -> bool:
    """Register our drafter class for ``architecture`` in the engine's registry, undoably; False where it is unknown."""
    before = registry.models.get(architecture)
    if before is None:
        return False
    registry.register_model(architecture, DRAFTER_CLASS)
    ours = registry.models[architecture]
    registry.models[architecture] = before
    patches.item("ModelRegistry.models", registry.models, architecture, ours)
    return True


def in_force() -> bool:
    """Whether this worker's runner drafts through us."""
    return bool(_patches.done)


def why_not() -> str:
    """The sentences that kept the runner as it is, for a refusal."""
    return "; ".join(_sentences)


def undo() -> list[str]:
    """Put back everything ``prepare`` has replaced; a sentence for each place that somebody else holds now."""
    _sentences.clear()
    return _patches.undo()
