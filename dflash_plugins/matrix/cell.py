"""One cell, run where its engine is: ``check``, ``prove``, ``bench`` where the plan asks for it, and the row of them.

``python -m dflash_plugins.matrix.cell ID`` prints ``{"row": ...}``, or ``{"aborted": REASON}`` and exits 2 where
nothing was learnt about the pair. ``matrix.run`` starts it in the environment of the cell.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_plugins import bench, prove, serve
from dflash_plugins.bench_report import BenchReport
from dflash_plugins.config import DraftConfig, read_draft_config, read_target_config
from dflash_plugins.config_models import fingerprint
from dflash_plugins.config_places import config_file, read_json
from dflash_plugins.driver import EngineDriver, EngineError, Progress
from dflash_plugins.engines import engine_facts
from dflash_plugins.errors import DFlashPluginsError, Refused
from dflash_plugins.findings import Severity, errors
from dflash_plugins.hub import Model, locate
from dflash_plugins.matrix.installed import hardware, installed_engine, without_paths
from dflash_plugins.matrix.plan import PROOF_ONLY, Cell, find_cell
from dflash_plugins.matrix.rows import (
    MatrixRow,
    RowLaunch,
    RowModel,
    RowPrompts,
    RowProof,
    RowResults,
    RowSampling,
    RowSpeed,
    acceptance_floor,
)
from dflash_plugins.pairs import TARGETS, load_prompts
from dflash_plugins.report import CheckReport

DTYPE = "float32"
_LONGEST_REASON = 300


def measure(
    cell: Cell,
    target: Model,
    draft: Model,
    *,
    prompts: str | Path | None = None,
    driver: EngineDriver | None = None,
    progress: Progress | None = None,
) -> MatrixRow:
    """Run a cell and write its row down; ``prompts`` stand in for those of the plan.

    A pair that is refused, an engine that fails and a proof that fails make a failed row. Raises
    ``DFlashPluginsError`` where the cell could not be run.
    """
    row = _Row(cell, target, draft, driver)
    if reasons := row.refusals():
        return row.failed("check refuses the pair: " + "; ".join(reasons))
    given = cell.how.arguments() | ({} if prompts is None else {"prompts": prompts})
    options: dict[str, Any] = {"dtype": DTYPE, "progress": progress, "driver": driver}
    try:
        report = prove.run(cell.place.engine, target.folder, draft.folder, **given, **options)
    except (EngineError, Refused) as error:
        return row.failed(str(error))
    speed = None
    if cell.speed is not None and report.lossless:
        asked = cell.speed.model_dump(exclude={"k"}) | {"progress": progress, "driver": driver}
        speed = speed_of(bench.run(cell.place.engine, target.folder, draft.folder, ks=(cell.speed.k,), **asked))
    used = prompts or cell.how.prompts or ("demo" if cell.decoding == "sampled" else "prove")
    results = results_of(report, prompt_set(used, report.prompts), speed)
    return row.passed(report, results) if report.lossless else row.failed(why_lossy(report), report, results)


class _Row:
    """The parts of a row that are known before anything runs."""

    def __init__(self, cell: Cell, target: Model, draft: Model, driver: EngineDriver | None) -> None:
        self.cell, self.target, self.draft = cell, target, draft
        self.engine = installed_engine(cell.place)
        planned = {"dtype": DTYPE, **cell.how.extra}
        planned |= {} if cell.place.runner is None else {"runner": cell.place.runner}
        planned |= {} if cell.place.evidence == "gpu" else {"device": "cpu"}
        self.check: CheckReport = serve.check(cell.place.engine, target, draft, settings=planned)
        self.config = read_draft_config(draft.folder).require()

    def refusals(self) -> list[str]:
        """What ``check`` refuses, but for an older row of this very matrix."""
        return [f"[{one.code}] {one.message}" for one in errors(self.check.findings) if one.code != "matrix"]

    def passed(self, report: prove.ProveReport, results: RowResults) -> MatrixRow:
        return self._row("passed", None, report, results)

    def failed(
        self, reason: str, report: prove.ProveReport | None = None, results: RowResults | None = None
    ) -> MatrixRow:
        """``reason`` becomes one line without paths of this machine."""
        words = " ".join(without_paths(reason).split())
        return self._row("failed", words[:_LONGEST_REASON], report, results)

    def _row(
        self, result: str, reason: str | None, report: prove.ProveReport | None, results: RowResults | None
    ) -> MatrixRow:
        flags = {} if report is None else dict(report.flags)
        on_gpu = str(flags.get("device", "cpu")).split(":")[0] not in ("cpu", "None")
        fields = {
            "id": self.cell.id,
            "result": result,
            "reason": reason,
            "date": datetime.datetime.now(datetime.UTC).date(),
            "evidence": "gpu" if on_gpu else self.cell.place.evidence,
            "command": self.cell.command(),
            "engine": self.engine,
            "target": target_row(self.target),
            "draft": draft_row(self.draft, self.config, self.check),
            "launch": launch_row(self.cell, self.config, report, flags),
            "results": results,
            "known_issues": self._known_issues(),
        }
        return MatrixRow.model_validate(fields)

    def _known_issues(self) -> tuple[str, ...]:
        """Warnings of the check, and the engine's known bugs here, which it only tells, as the plugin mends them."""
        bugs = {bug.id for bug in engine_facts(self.cell.place.engine).bugs}
        told = [one for one in self.check.findings if one.severity is Severity.WARNING or one.code in bugs]
        said = (without_paths(f"{one.code}: {one.message}") for one in told if one.code != "matrix")
        return tuple(dict.fromkeys(said))


def target_row(model: Model) -> RowModel:
    """A target by its description; an embedded one says what its weights are."""
    config = read_target_config(model.folder)
    embedded = TARGETS.get(model.embedded or "")
    quantised = read_json(config_file(model.folder, "target")).get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return RowModel(
        name=model.label,
        revision=model.weights,
        quantisation=embedded.note.partition(":")[0] if embedded else method,
        fingerprint=fingerprint(config),
        dtype=config.dtype,
    )


def draft_row(model: Model, config: DraftConfig, check: CheckReport) -> RowModel:
    """A drafter; ours are never quantised, and check refuses those that are."""
    return RowModel(
        name=model.label,
        revision=model.weights,
        fingerprint=config.fingerprint,
        dtype=None if check.draft is None else check.draft.dtype,
    )


def launch_row(
    cell: Cell, config: DraftConfig, report: prove.ProveReport | None, flags: Mapping[str, Any]
) -> RowLaunch:
    """How the cell ran, by the flags that were in force in the engine."""
    sampled = cell.decoding == "sampled"
    # SGLang's draft sampling follows the drafter: without a selector the best token at any temperature.
    draws = sampled and (cell.place.engine == "vllm" or config.selector is not None)
    limits = {
        "max_num_seqs": flags.get("max_num_seqs", flags.get("max_running_requests")),
        "max_num_batched_tokens": flags.get("max_num_batched_tokens", flags.get("chunked_prefill_size")),
    }
    radix_off, eager = flags.get("disable_radix_cache"), flags.get("enforce_eager", flags.get("disable_cuda_graph"))
    return RowLaunch(
        method=cell.method,
        mode=None if config.loop is None else config.loop.mode,
        decoding=cell.decoding,
        temperature=cell.how.temperature or 0.0,
        k=config.k if report is None else report.k,
        draft_sampling="probabilistic" if draws else "greedy",
        dtype=DTYPE,
        hardware=hardware(),
        concurrency=(cell.how.concurrency or 1) if report is None else report.concurrency,
        attention_backend=flags.get("attention_backend"),
        kv_cache_dtype=flags.get("kv_cache_dtype"),
        scheduling={name: value for name, value in limits.items() if value is not None},
        prefix_cache=flags.get("enable_prefix_caching", None if radix_off is None else not radix_off),
        max_model_len=flags.get("max_model_len"),
        tensor_parallel_size=flags.get("tensor_parallel_size", flags.get("tp_size")),
        graphs=None if eager is None else not eager,
    )


def prompt_set(name: str | Path, count: int) -> RowPrompts:
    """The set that ``count`` prompts were taken of, and the hash of what it says."""
    said = [[one.id, one.prompt, one.ids] for one in load_prompts(name)]
    digest = hashlib.sha256(json.dumps(said, ensure_ascii=False).encode()).hexdigest()
    return RowPrompts(name=Path(name).stem, count=count, sha256=digest)


def results_of(report: prove.ProveReport, prompts: RowPrompts, speedup: RowSpeed | None) -> RowResults:
    """The figures of a proof, rounded to what they mean."""
    verdicts = [one.verdict for one in report.differences]
    test = report.test
    return RowResults(
        prompts=prompts,
        proof=RowProof(
            lossless=report.lossless,
            tokens=report.tokens,
            ties=verdicts.count("tie"),
            numerical=verdicts.count("numerical"),
            fails=verdicts.count("FAIL"),
        ),
        sampling=None
        if test is None
        else RowSampling(
            p=round(test.p, 5),
            alpha=test.alpha,
            samples=test.samples,
            smallest_detectable_tv=round(test.smallest_detectable_tv, 4),
        ),
        emitted_per_round=round(report.emitted_per_round, 4),
        accepted_by_slot=tuple(round(rate, 4) for rate in report.accepted_by_slot),
        acceptance_floor=acceptance_floor(report.emitted_per_round),
        speedup=speedup,
    )


def speed_of(report: BenchReport) -> RowSpeed:
    """The speed-ups of a ``bench`` of one K."""
    return RowSpeed(
        dtype=report.dtype,
        k=report.rows[0].k,
        runs=report.runs,
        prompts=report.prompts,
        max_tokens=report.max_tokens,
        by_concurrency={at: round(ratio, 3) for at, ratio in report.speedup_by_concurrency().items()},
    )


def why_lossy(report: prove.ProveReport) -> str:
    """The reason of a failed proof."""
    if report.test is not None:
        return f"the distributions differ: p = {report.test.p:.3g}, below {report.test.alpha:g}"
    first = next(one for one in report.differences if one.verdict == "FAIL")
    return f"not lossless: first at token {first.position} of prompt {first.prompt}, gap {first.gap}"


def main(arguments: Sequence[str], measured: Callable[[Cell], MatrixRow] | None = None) -> int:
    """The process of one cell: ``measured`` (by default what the plan says) makes the row that is printed."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no part of the answer
    document, code = answered(arguments, measured or from_plan)
    with contextlib.closing(answer):
        json.dump(document, answer)
    return code


def answered(arguments: Sequence[str], measured: Callable[[Cell], MatrixRow]) -> tuple[dict[str, Any], int]:
    """The document of a cell's process and its exit code."""
    try:
        (identity,) = (one for one in arguments if one != PROOF_ONLY)
        cell = find_cell(identity).without_speed() if PROOF_ONLY in arguments else find_cell(identity)
        return {"row": measured(cell).model_dump(mode="json")}, 0
    except (DFlashPluginsError, ValueError) as error:
        return {"aborted": without_paths(str(error))}, 2


def from_plan(cell: Cell) -> MatrixRow:
    """With the models that the plan names."""
    return measure(cell, locate(cell.model("target")), locate(cell.model("draft")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
