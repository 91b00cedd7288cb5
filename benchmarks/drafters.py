"""What drafters of one target emit per round through a real engine, prompt by prompt, and how they compare in pairs.

    ci/in-env core -- python ci/make_prompts.py --all measuring.jsonl
    ci/in-env vllm -- python benchmarks/drafters.py --prompts measuring.jsonl --per-set 100 --out run.jsonl \\
        --drafts smollm2-135m-dflash smollm2-135m-dflash2 smollm2-135m-dloop smollm2-135m-dflash@1,3 smollm2-135m-dloop@

Greedy. ``--batch`` that many prompts are decoded at once, in engines that tell what every round of a request emitted;
one at a time is needed for tokens per second, and elsewhere. ``NAME@1,3`` serves a drafter's weights in a loop with
these prefix lengths, ``NAME@`` in one pass, ``NAME@unselected`` with its selector off (one candidate a slot). Every
drafter is compared with the first one: the ratio of emitted per round over all prompts and by set, with a 95 % interval
from resampled prompts. What has been measured is in ``--out``, a line per prompt; the same command goes on where it
stopped. Texts that differ from the first drafter's are counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from dflash_plugins.driver import Counters, EngineConfig, Sampling, encode_prompts, find_driver
from dflash_plugins.pairs import Prompt, load_prompts, resolve
from dflash_plugins.statistics import bootstrap_ratio


def served(name: str, workshop: Path) -> Path:
    """The folder of a drafter as it is, or its weights with other passes or without its selector."""
    base, changed, how = name.partition("@")
    folder = resolve(base)
    if not changed:
        return folder
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if how == "unselected":
        raw["dflash_config"]["selector_top_k"] = 1
    else:
        raw["architectures"] = ["DLoopDraftModel"]
        prefixes = [int(length) for length in how.split(",") if length]
        raw["dflash_config"]["dloop"] = {"mode": "refine", "prefix_lengths": prefixes}
    out = workshop / name.replace("/", "_")
    out.mkdir()
    (out / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        (out / weights.name).symlink_to(weights.resolve())
    return out


def chosen(prompts: Sequence[Prompt], per_set: int | None) -> list[Prompt]:
    """The first ``per_set`` of each set."""
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.set] = taken.get(prompt.set, 0) + 1
        if per_set is None or taken[prompt.set] <= per_set:
            kept.append(prompt)
    return kept


def measure(options: argparse.Namespace, name: str, k: int, prompts: list[Prompt]) -> Iterator[dict[str, Any]]:
    """One engine with one drafter, prompt by prompt."""
    with tempfile.TemporaryDirectory() as workshop:
        config = EngineConfig(
            target=str(resolve(options.target)),
            draft=str(served(name, Path(workshop))),
            k=k,
            dtype=options.dtype,
            max_num_seqs=options.batch,
        )
        with find_driver(options.engine).start(config) as session:
            ids = encode_prompts(session, prompts, options.max_tokens)
            sampling = Sampling(max_tokens=options.max_tokens, ignore_eos=True, rounds=options.batch > 1)
            turns = [range(i, min(i + options.batch, len(ids))) for i in range(0, len(ids), options.batch)]
            for turn in track(turns, f"{name}, K {k}", console=Console(stderr=True), disable=options.quiet):
                done = session.generate([ids[i] for i in turn], sampling)
                for i, completion in zip(turn, done.completions, strict=True):
                    counters = done.counters if options.batch == 1 else of_one(completion.emitted or (), k)
                    yield {
                        "draft": name, "k": k, "id": prompts[i].id, "set": prompts[i].set, "rounds": counters.rounds,
                        "emitted": counters.rounds + counters.accepted, "by_slot": counters.accepted_by_slot,
                        "seconds": round(done.seconds / len(turn), 4), "tokens": len(completion.ids),
                        "text": hashlib.sha256(str(completion.ids).encode()).hexdigest()[:16],
                    }  # fmt: skip


def of_one(emitted: Sequence[int], k: int) -> Counters:
    """What the rounds of one request did. The last is left out where there are others: it may have been cut."""
    whole = emitted[:-1] or emitted
    by_slot = tuple(sum(count > slot for count in whole) for slot in range(1, k + 1))
    return Counters(rounds=len(whole), accepted=sum(by_slot), accepted_by_slot=by_slot)


def table(rows: list[dict[str, Any]], drafts: Sequence[str], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Per drafter, K and set: emitted per round and its ratio to the first drafter's."""
    by_cell = {(row["draft"], row["k"], row["id"]): row for row in rows}
    sets = {row["id"]: row["set"] for row in rows}
    found = []
    for k in ks:
        for draft in drafts:
            for name in ("all", *dict.fromkeys(sets.values())):
                ids = [one for one in sets if name in ("all", sets[one])]
                own, first = ([by_cell[who, k, one] for one in ids] for who in (draft, drafts[0]))
                ratio = bootstrap_ratio(
                    *([row[key] for row in of] for of in (own, first) for key in ("emitted", "rounds"))
                )
                rounds = sum(row["rounds"] for row in own)
                slots = [sum(column) / rounds for column in zip(*(row["by_slot"] for row in own), strict=True)]
                found.append({
                    "draft": draft, "k": k, "set": name, "prompts": len(ids), "rounds": rounds,
                    "emitted_per_round": sum(row["emitted"] for row in own) / rounds, "accepted_by_slot": slots,
                    "ratio": ratio.median, "ci95": [ratio.low, ratio.high],
                    "tokens_per_s": sum(row["tokens"] for row in own) / sum(row["seconds"] for row in own),
                    "other_texts": sum(a["text"] != b["text"] for a, b in zip(own, first, strict=True)),
                })  # fmt: skip
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--k", nargs="+", type=int, default=[3])
    parser.add_argument("--prompts", default="prove", help="a file, or demo or prove")
    parser.add_argument("--per-set", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    prompts = chosen(load_prompts(options.prompts), options.per_set)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    with options.out.open("a", encoding="utf-8") as out:
        for name in options.drafts:
            for k in options.k:
                there = {row["id"] for row in rows if (row["draft"], row["k"]) == (name, k)}
                missing = [prompt for prompt in prompts if prompt.id not in there]
                for row in measure(options, name, k, missing) if missing else ():
                    rows.append(row)
                    out.write(json.dumps(row) + "\n")
                    out.flush()
    wanted = {prompt.id for prompt in prompts}
    document = {"engine": options.engine, "target": options.target, "dtype": options.dtype, "batch": options.batch}
    document |= {"prompts": len(prompts), "max_tokens": options.max_tokens}
    document["rows"] = table([row for row in rows if row["id"] in wanted], options.drafts, options.k)
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
