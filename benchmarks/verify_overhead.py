"""Time of verification and alignment per round, against the bare argmax or softmax over the same logits.

    python benchmarks/verify_overhead.py [--batch 64] [--k 15] [--vocabulary 152000] [--repeats 9] [--json FILE]

The logits are fp32 [batch, k + 1, vocabulary]. One round is: target choices or probabilities, acceptance, emitted
tokens as lists, stop cuts, and draft/verify/commit of every request's alignment. The bare work is `logits.argmax(-1)`
for greedy rounds and `logits.softmax(-1)` for sampled ones. Bare and whole rounds alternate; the ratio is the median of
the pairwise ratios. With the defaults it needs 3 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

import dflash_plugins
from dflash_plugins.alignment import RequestAlignment
from dflash_plugins.proposals import Dense, Distribution, OneHot, Proposals, Sparse
from dflash_plugins.sampling import SamplingRule
from dflash_plugins.stopping import cut_emitted
from dflash_plugins.verify import Streams, Verdict, verify

CANDIDATES = 20
AGREEMENT = 0.8
PROMPT = 100


@dataclass(frozen=True)
class Scene:
    """One batch's target logits, with one clearly best token per row that most proposals agree with."""

    logits: Tensor
    ids: Tensor

    @classmethod
    def make(cls, batch: int, k: int, vocabulary: int) -> Scene:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(batch, k + 1, vocabulary, generator=generator)
        best = torch.randint(0, vocabulary, (batch, k + 1, 1), generator=generator)
        logits.scatter_(2, best, 20.0)
        wrong = torch.rand(batch, k, generator=generator) > AGREEMENT
        return cls(logits, torch.where(wrong, (best[:, :k, 0] + 1) % vocabulary, best[:, :k, 0]))

    def sparse_q(self) -> Distribution:
        """The proposal at one half, the rest spread over other candidates."""
        ids = (self.ids[..., None] + torch.arange(CANDIDATES)) % self.logits.shape[2]
        probs = torch.full(ids.shape, 0.5 / (CANDIDATES - 1))
        probs[..., 0] = 0.5
        return Sparse(ids, probs)

    def dense_q(self) -> Distribution:
        """The same over the whole vocabulary, which costs another copy of the size of the logits."""
        shape = (*self.ids.shape, self.logits.shape[2])
        probs = torch.full(shape, 0.5 / (shape[2] - 1)).scatter_(2, self.ids[..., None], 0.5)
        return Dense(probs)


def align(proposals: Proposals, verdict: Verdict) -> int:
    """What a round costs beside tensors: lists, cuts and one state machine per request, fresh from a prefill."""
    kept = 0
    rows = zip(proposals.lists(), verdict.accepted.tolist(), verdict.lists(), strict=True)
    for (drafted, accepted, emitted), request in zip(rows, requests_of(proposals), strict=True):
        request.draft(drafted)
        request.verify()
        tokens, _ = cut_emitted(emitted, max_new=1000, eos_ids=0)
        request.commit(accepted, kept=len(tokens))
        kept += len(tokens)
    return kept


def requests_of(proposals: Proposals) -> list[RequestAlignment]:
    """Requests ready to draft; building them is counted too, which real rounds do not pay."""
    machines = [RequestAlignment(PROMPT, k=proposals.num_slots) for _ in range(len(proposals.ids))]
    for machine in machines:
        machine.admit()
        machine.prefill(PROMPT - 1)
        machine.commit()
    return machines


def milliseconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


def compare(scene: Scene, q: Distribution, temperature: float, repeats: int) -> dict[str, float]:
    """Medians over alternating bare and whole rounds, after one unmeasured pair."""
    batch = scene.ids.shape[0]
    proposals, rule, streams = Proposals.of(scene.ids, q), SamplingRule.at(temperature, batch), Streams(0)
    bare = (lambda: scene.logits.argmax(-1)) if rule.all_greedy else (lambda: scene.logits.softmax(-1))
    verdict = verify(proposals, scene.logits, rule, streams)
    bare()
    pairs = []
    for _ in range(repeats):
        bare_ms = milliseconds(bare)
        verify_ms = milliseconds(lambda: verify(proposals, scene.logits, rule, streams))
        pairs.append((bare_ms, verify_ms, milliseconds(lambda: align(proposals, verdict))))
    bare_ms, verify_ms, align_ms = map(statistics.median, zip(*pairs, strict=True))
    ratios = [(verified + aligned) / plain for plain, verified, aligned in pairs]
    return {
        "temperature": temperature,
        "bare_ms": round(bare_ms, 2),
        "verify_ms": round(verify_ms, 2),
        "alignment_ms": round(align_ms, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_lowest": round(min(ratios), 3),
        "ratio_highest": round(max(ratios), 3),
        "mean_accepted": round(verdict.accepted.float().mean().item(), 2),
    }


def processor() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()


def measure(options: argparse.Namespace) -> dict[str, object]:
    scene = Scene.make(options.batch, options.k, options.vocabulary)
    rounds = {
        "greedy, one-hot q": compare(scene, OneHot(), 0.0, options.repeats),
        "sampled, one-hot q": compare(scene, OneHot(), 1.0, options.repeats),
        f"sampled, sparse q of {CANDIDATES}": compare(scene, scene.sparse_q(), 1.0, options.repeats),
        "sampled, dense q": compare(scene, scene.dense_q(), 1.0, options.repeats),
        f"sampled at 0.8, sparse q of {CANDIDATES}": compare(scene, scene.sparse_q(), 0.8, options.repeats),
    }
    return {
        "what": "one round of verification and alignment over bare argmax (greedy) or softmax (sampled)",
        "date": datetime.now(UTC).date().isoformat(),
        "batch": options.batch,
        "k": options.k,
        "vocabulary": options.vocabulary,
        "logits": "fp32",
        "repeats": options.repeats,
        "rounds": rounds,
        "hardware": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "dflash-plugins": dflash_plugins.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--k", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    options = parser.parse_args()
    record = measure(options)
    text = json.dumps(record, indent=2) + "\n"
    print(text, end="")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text)


if __name__ == "__main__":
    main()
