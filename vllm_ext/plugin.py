"""Entry point of vLLM's plugin group: what it does, it does in milliseconds, and whatever happens it does not raise.

vLLM calls ``register`` in every process and lets its exceptions kill the server. Everywhere: the architecture of D-Loop
is added (by name, imported when a drafter is built), and two methods of the config are wrapped (see ``runner``). On
CPU platforms also: our class behind the architectures that vLLM serves itself, and two broken kernel stand-ins, by
functions that probe the engine's own at the first call. Everything else is as shipped.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_plugins import switches
from dflash_plugins.hooks import Hook, Patches, drift
from dflash_plugins.switches import DISABLE, log_disabled
from vllm_ext import runner
from vllm_ext.hooks import (
    AT_REGISTRATION,
    EXPAND_KERNEL,
    EXPAND_KERNEL_TAKEN,
    REJECTION_KERNEL,
    REJECTION_KERNEL_TAKEN,
    WORKER_BASE,
)

# A child of vLLM's own logger, so that lines reach whatever handler and level the server was given.
logger = logging.getLogger("vllm.dflash_plugins")

NO_CONTEXT_K_NORM = "DFLASH_PLUGINS_NO_MEND_CONTEXT_K_NORM"
NO_EXPAND_KERNEL = "DFLASH_PLUGINS_NO_MEND_EXPAND_KERNEL"
NO_REJECTION_KERNEL = "DFLASH_PLUGINS_NO_MEND_REJECTION_KERNEL"

_patches = Patches()


@dataclass(frozen=True)
class Switches:
    """What the environment asks for: everything off, or single mends off."""

    disable: bool = False
    no_context_k_norm: bool = False
    no_expand_kernel: bool = False
    no_rejection_kernel: bool = False


def read_switches(environment: Mapping[str, str]) -> Switches:
    """Switches of an environment; ValueError naming every variable whose value is neither true nor false."""
    return Switches(
        *switches.read_switches(environment, (DISABLE, NO_CONTEXT_K_NORM, NO_EXPAND_KERNEL, NO_REJECTION_KERNEL))
    )


def register() -> None:
    """Register with vLLM. May be called any number of times; logs what it refuses and why; never raises."""
    try:
        _register()
    except Exception:
        undo()
        logger.exception("dflash-plugins: registration failed, nothing is registered")


def undo() -> list[str]:
    """Put back everything that has been replaced; a sentence for each place that somebody else holds now."""
    return runner.undo() + runner.undo_audit() + _patches.undo()


def _register() -> None:
    if _patches.done:
        logger.debug("dflash-plugins: registered already: %s", ", ".join(_patches.places))
        return
    try:
        wanted = read_switches(os.environ)
    except ValueError as error:
        logger.error("dflash-plugins: nothing is registered: %s", error)
        return
    if wanted.disable:
        log_disabled(os.environ, logger)
        return
    sentences = drift(AT_REGISTRATION)
    if sentences:
        logger.error("dflash-plugins: nothing is registered, vLLM has changed: %s", "; ".join(sentences))
        return
    _register_on(wanted)


def _register_on(wanted: Switches) -> None:
    from vllm.platforms import current_platform

    _register_loop()
    if not current_platform.is_cpu():
        logger.debug("dflash-plugins: not a CPU platform, nothing to mend")
        return
    _register_mended_drafters()
    _register_kernel("expand kernel", EXPAND_KERNEL, EXPAND_KERNEL_TAKEN, NO_EXPAND_KERNEL, wanted.no_expand_kernel)
    _register_kernel(
        "rejection kernel", REJECTION_KERNEL, REJECTION_KERNEL_TAKEN, NO_REJECTION_KERNEL, wanted.no_rejection_kernel
    )


def _register_loop() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in runner.DLOOP:
        if architecture in ModelRegistry.models:
            logger.error("dflash-plugins: this vLLM serves %s itself, it is left as it is", architecture)
            continue
        ModelRegistry.register_model(architecture, runner.DRAFTER_CLASS)
        _patches.added("ModelRegistry.models", ModelRegistry.models, architecture)
    refusal, first_call = "_get_v1_model_runner_unsupported_features", "enable_trace_function_call_for_thread"
    _patches.attribute(VllmConfig, refusal, runner.without_refusal(getattr(VllmConfig, refusal)))
    _patches.attribute(VllmConfig, first_call, runner.before_the_runner(getattr(VllmConfig, first_call)))
    worker = sys.modules.get(WORKER_BASE.module)
    if worker is not None and _no_drift(WORKER_BASE):
        _patches.attribute(worker.WorkerBase, "__init__", runner.before_a_worker(worker.WorkerBase.__init__))


def _no_drift(hook: Hook) -> bool:
    sentences = drift((hook,))
    if sentences:
        logger.error("dflash-plugins: no drafting in processes of their own, vLLM has changed: %s", sentences[0])
    return not sentences


def _register_mended_drafters() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in (runner.DFLASH, runner.DFLASH2):
        if not runner.serve_with_our_class(_patches, ModelRegistry, architecture):
            logger.error("dflash-plugins: this vLLM does not serve %s, its drafter is not registered", architecture)


def _register_kernel(what: str, kernel: Hook, taken: Hook, switch: str, off: bool) -> None:
    """Put a stand-in for the engine's ``kernel`` in its place, unless that is ``off`` or the engine has changed."""
    if off:
        logger.warning("dflash-plugins: the mend of the %s is off (%s)", what, switch)
        return
    sentences = drift((kernel, taken))
    if sentences:
        logger.error("dflash-plugins: the %s is not mended, vLLM has changed: %s", what, "; ".join(sentences))
        return
    from vllm.utils import cpu_triton_utils

    from vllm_ext.cpu_mends import MENDED_KERNELS

    stand_in = MENDED_KERNELS[kernel.attribute](getattr(cpu_triton_utils, kernel.attribute))
    _patches.attribute(cpu_triton_utils, kernel.attribute, stand_in)
