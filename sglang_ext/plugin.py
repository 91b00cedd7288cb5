"""Entry point of SGLang's plugin group: what it does, it does in milliseconds, and whatever happens it does not raise.

SGLang calls ``register`` once in every process. Two functions get a hook by the engine's own registry: the one that
reads the arguments of DFLASH (a pair is refused there, before anything loads; a CPU may pass), and the one that says
which class drafts. Both do nothing for a run without DFLASH. Everything else is done in the scheduler's process of a
run that asks for it, see ``runner.prepare``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from dflash_plugins.errors import DFlashPluginsError
from dflash_plugins.hooks import drift
from dflash_plugins.switches import DISABLE, log_disabled, read_switches

# A child of SGLang's own logger, so that lines reach whatever handler and level the server was given.
logger = logging.getLogger("sglang.dflash_plugins")

_state = {"registered": False, "in_force": False}


def register() -> None:
    """Register with SGLang. May be called any number of times; logs what it refuses and why; never raises."""
    try:
        _register()
    except Exception:
        undo()
        logger.exception("dflash-plugins: registration failed, nothing is registered")


def undo() -> list[str]:
    """Let the hooks, which the engine's registry keeps, do nothing any more, and put back what a worker replaced."""
    _state["in_force"] = False
    from sglang_ext import runner

    return runner.undo()


def _register() -> None:
    if _state["in_force"]:
        return
    try:
        (disabled,) = read_switches(os.environ, (DISABLE,))
    except ValueError as error:
        logger.error("dflash-plugins: nothing is registered: %s", error)
        return
    if disabled:
        log_disabled(os.environ, logger)
        return
    from sglang_ext.hooks import AT_REGISTRATION, CREATE_WORKER, HANDLE_ARGUMENTS

    sentences = drift(AT_REGISTRATION)
    if sentences:
        logger.error("dflash-plugins: nothing is registered, SGLang has changed: %s", "; ".join(sentences))
        return
    _state["in_force"] = True
    if _state["registered"]:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HANDLE_ARGUMENTS, around_arguments, HookType.AROUND)
    HookRegistry.register(CREATE_WORKER, around_create_worker, HookType.AROUND)
    _state["registered"] = True


def around_arguments(shipped: Any, server_args: Any) -> Any:
    """Stand around the engine's reading of DFLASH's arguments: refuse a pair that cannot be served with all reasons."""
    if not _state["in_force"]:
        return shipped(server_args)
    from sglang_ext import serving

    if serving.served(server_args, warn=True) is not None:
        refuse_without_effect()
    with serving.platform_admitted(server_args):
        return shipped(server_args)


def around_create_worker(shipped: Any, algorithm: Any, server_args: Any) -> Any:
    """Stand around the engine's choice of the class that drafts."""
    worker = shipped(algorithm, server_args)
    if not _state["in_force"] or not algorithm.is_dflash():
        return worker
    from sglang_ext import runner

    return runner.prepare(worker, server_args)


def refuse_without_effect() -> None:
    """DFlashPluginsError where the engine's registry has not applied the other hook: it only logs that it failed."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    if not hasattr(SpeculativeAlgorithm.create_worker, "__wrapped__"):
        raise DFlashPluginsError(
            "SGLang could not apply our hook to SpeculativeAlgorithm.create_worker (its log says why), so that its own "
            f"worker would draft; {DISABLE}=1 serves without this plugin"
        )
