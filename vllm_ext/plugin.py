"""Entry point of vLLM's plugin group: what it does, it does in milliseconds, and whatever happens it does not raise.

vLLM calls ``register`` in every process and lets its exceptions kill the server. Here only two names are exchanged,
on CPU platforms: the class behind the drafter's architecture (by name, imported when a drafter is built) and the
broken kernel stand-in (by a function that probes the engine's own at the first call). Everything else is as shipped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_ext.hooks import AT_REGISTRATION, EXPAND_KERNEL, EXPAND_KERNEL_TAKEN, Patches, drift

# A child of vLLM's own logger, so that lines reach whatever handler and level the server was given.
logger = logging.getLogger("vllm.dflash_plugins")

ARCHITECTURE = "DFlashDraftModel"
DRAFTER_CLASS = "vllm_ext.dflash:DFlashPluginsDraftModel"

DISABLE = "DFLASH_PLUGINS_DISABLE"
NO_CONTEXT_K_NORM = "DFLASH_PLUGINS_NO_MEND_CONTEXT_K_NORM"
NO_EXPAND_KERNEL = "DFLASH_PLUGINS_NO_MEND_EXPAND_KERNEL"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}

_patches = Patches()


@dataclass(frozen=True)
class Switches:
    """What the environment asks for: everything off, or single mends off."""

    disable: bool = False
    no_context_k_norm: bool = False
    no_expand_kernel: bool = False


def read_switches(environment: Mapping[str, str]) -> Switches:
    """Switches of an environment; ValueError naming every variable whose value is neither true nor false."""
    values: dict[str, bool] = {}
    wrong: list[str] = []
    for name in (DISABLE, NO_CONTEXT_K_NORM, NO_EXPAND_KERNEL):
        text = environment.get(name, "").strip().lower()
        if text not in _TRUE | _FALSE:
            wrong.append(f"{name}={environment[name]!r}")
        values[name] = text in _TRUE
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: neither true nor false; use 1 or 0")
    return Switches(values[DISABLE], values[NO_CONTEXT_K_NORM], values[NO_EXPAND_KERNEL])


def register() -> None:
    """Register with vLLM. May be called any number of times; logs what it refuses and why; never raises."""
    try:
        _register()
    except Exception:
        undo()
        logger.exception("dflash-plugins: registration failed, nothing is registered")


def undo() -> list[str]:
    """Put back everything ``register`` has replaced; a sentence for each place that somebody else holds now."""
    return _patches.undo()


def _register() -> None:
    if _patches.done:
        logger.debug("dflash-plugins: registered already: %s", ", ".join(_patches.places))
        return
    try:
        switches = read_switches(os.environ)
    except ValueError as error:
        logger.error("dflash-plugins: nothing is registered: %s", error)
        return
    if switches.disable:
        logger.info("dflash-plugins: %s is set, nothing is registered", DISABLE)
        return
    sentences = drift(AT_REGISTRATION)
    if sentences:
        logger.error("dflash-plugins: nothing is registered, vLLM has changed: %s", "; ".join(sentences))
        return
    _register_on(switches)


def _register_on(switches: Switches) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        logger.debug("dflash-plugins: not a CPU platform, nothing to mend")
        return
    _register_drafter()
    if switches.no_expand_kernel:
        logger.warning("dflash-plugins: the mend of the expand kernel is off (%s)", NO_EXPAND_KERNEL)
    else:
        _register_expand_kernel()


def _register_drafter() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    before = ModelRegistry.models.get(ARCHITECTURE)
    if before is None:
        logger.error("dflash-plugins: this vLLM does not serve %s, its drafter is not registered", ARCHITECTURE)
        return
    ModelRegistry.register_model(ARCHITECTURE, DRAFTER_CLASS)
    ours = ModelRegistry.models[ARCHITECTURE]
    ModelRegistry.models[ARCHITECTURE] = before
    _patches.item("ModelRegistry.models", ModelRegistry.models, ARCHITECTURE, ours)


def _register_expand_kernel() -> None:
    sentences = drift((EXPAND_KERNEL, EXPAND_KERNEL_TAKEN))
    if sentences:
        logger.error("dflash-plugins: the expand kernel is not mended, vLLM has changed: %s", "; ".join(sentences))
        return
    from vllm.utils import cpu_triton_utils

    from vllm_ext.cpu_mends import mended_expand_kernel

    stand_in = mended_expand_kernel(cpu_triton_utils._expand_kernel_impl)
    _patches.attribute(cpu_triton_utils, "_expand_kernel_impl", stand_in)
