"""A cell of the compatibility matrix on vLLM's V2 runner: ``python tests/engine/v2_cell.py ID`` in vLLM's environment.

The package's own ``prove``, through the package's own driver and worker, but the worker's process first calls
``v2_interpreter.activate()``: only that brings the runner to a CPU, and it is a helper of tests, so the cell is a
script of theirs. The pair is the tiny trained one, for the interpreter computes a few dozen tokens a second.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPTS = 24


def drive():
    """The process of the cell: which starts engines, and imports none."""
    sys.path[:0] = [str(HERE.parent)]
    from dflash_plugins.matrix import cell

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    sys.exit(cell.main(sys.argv[1:], measured))


def measured(planned):
    import trained

    from dflash_plugins.hub import Model
    from dflash_plugins.matrix.cell import measure

    target, draft = trained.pair(planned.method)
    names = "tiny-trained", f"tiny-trained-{planned.method}"
    models = [Model(str(folder), folder, embedded=name) for folder, name in zip((target, draft), names, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "tiny.jsonl"
        lines = [{"id": str(n), "ids": ids} for n, ids in enumerate(trained.prompts(PROMPTS, seed=6))]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return measure(planned, *models, prompts=prompts, driver=driver())


def driver():
    """vLLM's driver, whose worker is this file."""
    from dflash_plugins.driver import WorkerProcess
    from vllm_ext.driver import VllmDriver, worker_environment

    class InterpretedDriver(VllmDriver):
        def start(self, config):
            argv, verbose = [sys.executable, __file__, "--worker"], "VLLM_LOGGING_LEVEL" in os.environ
            return WorkerProcess(argv, config, worker_environment(os.environ), verbose=verbose)

    return InterpretedDriver()


def work():
    """The process of an engine: as ``vllm_ext.worker``, after the interpreter."""
    sys.argv.remove("--worker")
    from dflash_plugins.worker import run

    def start(config, channel):
        import v2_interpreter

        v2_interpreter.activate()
        from vllm_ext.worker import Worker

        return Worker(config, channel)

    run(start)


if __name__ == "__main__":
    work() if "--worker" in sys.argv else drive()
