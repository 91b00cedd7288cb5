"""Starts SGLang behind the core's driver protocol. Imports no engine: that happens in the worker process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping

from dflash_plugins.driver import EngineConfig, WorkerProcess
from dflash_plugins.errors import BadInput

OWN_OPTIONS = frozenset(
    {"context_length", "dtype", "max_running_requests", "model_path", "random_seed", "return_hidden_states_mode"}
    | {"speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens"}
    | {"speculative_dflash_block_size"}
)


class SglangDriver:
    """SGLang in worker processes of the running Python environment."""

    name = "sglang"

    def missing(self) -> str | None:
        """See ``EngineDriver.missing``."""
        if importlib.util.find_spec("sglang") is None:
            return "SGLang is not installed in this environment: install sglang"
        return None

    def start(self, config: EngineConfig) -> WorkerProcess:
        """See ``EngineDriver.start``."""
        if taken := sorted(OWN_OPTIONS & set(config.extra)):
            raise BadInput(f"engine flags that the command decides, use its own options: {', '.join(taken)}")
        argv = [sys.executable, "-m", "sglang_ext.worker"]
        # Whoever has set the engine's log level wants to read that log.
        return WorkerProcess(argv, config, worker_environment(os.environ), verbose="log_level" in config.extra)


def worker_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment with what an engine in a worker needs. What the user has set wins but for one must."""
    defaults = {
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # The last lines of an engine that dies have to be in the log by then.
    musts = {"PYTHONUNBUFFERED": "1"}
    return {**defaults, **parent, **musts}
