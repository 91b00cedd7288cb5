"""SGLang's server in a process group of its own, on a CPU; what is asked of it is in http_server."""

import json
import os
import sys
import time
from typing import ClassVar

import http_server
import requests
from http_server import ROOT, TIMEOUT, Server

END = b"data: [DONE]"


class SglangServer(Server):
    """As ``Server``; ``native`` asks the engine itself, and ``load``, ``idle`` and ``flush`` look after its cache."""

    engine = "sglang"
    keep_stop: ClassVar = {"no_stop_trim": True}
    stop_found = "matched_stop"

    def native(self, *, sampling_params, **body):
        """The answer of ``/generate``, greedy unless said otherwise."""
        body |= {"sampling_params": {"temperature": 0} | sampling_params}
        return requests.post(f"{self.url}/generate", json=body, timeout=TIMEOUT, stream=body.get("stream", False))

    def native_stream(self, **body):
        """The same, streamed: every chunk holds all of the answer so far. The last one."""
        with self.native(**body, stream=True) as answer:
            *_, last = (line.removeprefix(b"data: ") for line in answer.iter_lines() if line not in (b"", END))
        return json.loads(last)

    def load(self):
        """What the scheduler says of itself: ``num_running_reqs``, ``num_used_tokens`` and more.

        A used token is in a slot that is neither free nor held by the prefix cache alone.
        """
        (load,) = requests.get(f"{self.url}/v1/loads", timeout=TIMEOUT).json()["loads"]
        return load

    def idle(self, within=60):
        """The load once nothing runs or waits and no slot is used; an error if that does not come."""
        began = time.monotonic()
        while time.monotonic() - began < within:
            load = self.load()
            if not load["num_running_reqs"] + load["num_waiting_reqs"] + load["num_used_tokens"]:
                return load
            time.sleep(0.2)
        raise AssertionError(f"still held after {within} s: {load}")

    def flush(self):
        """Empty the prefix cache, which the engine does only while nothing runs; whether it did."""
        return requests.post(f"{self.url}/flush_cache", timeout=TIMEOUT).ok


def start(target, drafter, log, *, site, k=7, options=()):
    """Starts a server on a free port and does not wait for it; ``drafter`` None serves the target alone.

    A pair is served by ``dflash-plugins serve``, the target alone by the engine's own command. ``site`` is a folder
    with the metadata of the checkout's distribution, see conftest.write_distribution.
    """
    port = http_server.free_port()
    alone = ["-m", "sglang.launch_server", "--model-path", str(target)]
    argv = http_server.serving("sglang", target, drafter, k) or alone
    argv += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    argv += ["--attention-backend", "torch_native"]
    argv += ["--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--max-running-requests", "8"]
    argv += ["--served-model-name", "tiny", "--random-seed", "0", "--enable-metrics", "--disable-cuda-graph"]
    argv += ["--sleep-on-idle", *options]  # two servers take turns: one that waits must not spin
    settings = {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    return SglangServer(http_server.launch([sys.executable, *argv], settings, log), port, log)
