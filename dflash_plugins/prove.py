"""``prove``: is what a real engine emits with speculation what it emits without?

At temperature 0 the ids of the same prompts are compared and every difference is judged (identity.py). Above it, many
short continuations of a few prompts are drawn with and without, and a test decided beforehand compares their
distributions (statistics.py). Either way both engines differ in speculation only.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from dflash_plugins.check import inspect_pair
from dflash_plugins.driver import (
    Counters,
    EngineConfig,
    EngineDriver,
    EngineSession,
    Generated,
    Progress,
    Sampling,
    encode_prompts,
    find_driver,
    require_comparable,
)
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.identity import Difference, compared_tokens, differences
from dflash_plugins.pairs import load_prompts, resolve
from dflash_plugins.pairs.prompts import Prompt
from dflash_plugins.statistics import TwoSampleTest, two_sample_test

MAX_MODEL_LEN = 2048
SAMPLED_PROMPTS = 4
# The first token of a continuation comes from the prompt's own forward, in both arms alike; speculation makes the
# others.
SAMPLED_TOKENS = 4
SAMPLED_CONCURRENCY = 64
# Every sample computes its prompt again where the prefix cache has large blocks, and any context shows a distribution.
SAMPLED_CONTEXT = 24


class Comparison(BaseModel):
    """Greedy texts of one drafter held against plain ones."""

    model_config = ConfigDict(frozen=True)

    lossless: bool
    tokens: int
    differences: tuple[Difference, ...]
    emitted_per_round: float
    accepted_by_slot: tuple[float, ...]


class ProveReport(BaseModel):
    """Outcome. ``lossless`` is false only on a FAIL: a difference with a real gap, or p below alpha when sampling.

    ``flags`` are those in force in both engines (``driver.Hello``).
    """

    model_config = ConfigDict(frozen=True)

    engine: str
    engine_version: str
    target: str
    draft: str
    k: int
    dtype: str
    temperature: float
    concurrency: int
    lossless: bool
    prompts: int
    tokens: int
    differences: tuple[Difference, ...]
    test: TwoSampleTest | None
    emitted_per_round: float
    accepted_by_slot: tuple[float, ...]
    drafter_independence: Comparison | None
    findings: tuple[Finding, ...]
    flags: Mapping[str, Any] = {}

    @property
    def exit_code(self) -> int:
        """0 when nothing failed, else 1."""
        return 0 if self.lossless else 1

    def render(self, console: Console) -> None:
        """Write the report for people."""
        _render(self, console)


@dataclass(frozen=True)
class Job:
    """A checked request: nothing that can be known without an engine is wrong with it any more."""

    driver: EngineDriver
    config: EngineConfig
    prompts: tuple[Prompt, ...]
    findings: tuple[Finding, ...]
    progress: Progress

    @property
    def k(self) -> int:
        """Served number of proposals."""
        assert self.config.k is not None
        return self.config.k


def run(
    engine: str,
    target: str | Path,
    draft: str | Path,
    *,
    k: int | None = None,
    prompts: str | Path | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    concurrency: int = 1,
    dtype: str = "float32",
    drafter_independence: bool = False,
    samples: int = 500,
    ignore_eos: bool = False,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    driver: EngineDriver | None = None,
) -> ProveReport:
    """Run the engine with and without speculation and compare.

    ``k`` counts proposals (default: the trained block's), ``prompts`` is a file or an embedded set (default: 60 prompts
    when greedy, four of the demo's when sampling), ``concurrency`` the largest batch. When sampling, ``samples``
    continuations of ``SAMPLED_TOKENS`` tokens are drawn per prompt and arm, after the prompt's last
    ``SAMPLED_CONTEXT`` tokens and at least ``SAMPLED_CONCURRENCY`` at once; ``max_tokens`` is not used.
    ``drafter_independence`` repeats the greedy comparison with the drafter's weights shuffled. ``extra`` holds
    arguments under the engine's own names. Raises BadInput, Refused, EngineMissing or EngineError.
    """
    sampling = temperature > 0
    _require_arguments(max_tokens, temperature, concurrency, samples, drafter_independence)
    names = load_prompts(prompts if prompts is not None else "demo" if sampling else "prove")
    pair, findings = check_inputs(engine, target, draft, k, extra or {})
    config = EngineConfig(
        **pair,
        dtype=dtype,
        draft_sample_method="probabilistic" if sampling else "greedy",
        max_num_seqs=max(concurrency, SAMPLED_CONCURRENCY) if sampling else concurrency,
        seed=seed,
        memory_share=0.5,
        extra=extra or {},
    )
    job = Job(driver or find_driver(engine), config, names, findings, progress or _silent)
    if sampling:
        return _prove_sampled(job, temperature, samples)
    return _prove_greedy(job, Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos), drafter_independence)


def _silent(stage: str, done: int, total: int) -> None:
    """No progress is wanted."""


def _require_arguments(
    max_tokens: int, temperature: float, concurrency: int, samples: int, drafter_independence: bool
) -> None:
    faults = [
        f"{name} is {value}, at least 1 is needed"
        for name, value in (("max_tokens", max_tokens), ("concurrency", concurrency), ("samples", samples))
        if value < 1
    ]
    if not 0 <= temperature < float("inf"):
        faults.append(f"temperature is {temperature}, it cannot be negative or without bound")
    if drafter_independence and temperature > 0:
        faults.append("drafter independence compares ids: it needs temperature 0")
    if faults:
        raise BadInput("; ".join(faults))


def check_inputs(
    engine: str, target: str | Path, draft: str | Path, k: int | None, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Target, draft, k and length of an EngineConfig, and the warnings; raises Refused before any engine starts."""
    target_path, draft_path = resolve(str(target)), resolve(str(draft))
    report = inspect_pair(draft_path, target_path, k=k, engine=engine, settings=settings)
    draft_config = report.require()
    limit = (report.target and report.target.max_position_embeddings) or MAX_MODEL_LEN
    warnings = tuple(f for f in report.findings if f.severity is Severity.WARNING)
    pair = {
        "target": str(target_path),
        "draft": str(draft_path),
        "k": draft_config.k if k is None else k,
        "max_model_len": min(limit, MAX_MODEL_LEN),
    }
    return pair, warnings


@contextlib.contextmanager
def _plain_session(job: Job, room: int) -> Iterator[tuple[EngineSession, list[list[int]]]]:
    """The plain engine and the token ids of all prompts, which both engines are given."""
    job.progress("starting the plain engine", 0, 1)
    with job.driver.start(job.config.plain()) as session:
        job.progress("starting the plain engine", 1, 1)
        yield session, encode_prompts(session, job.prompts, room)


@contextlib.contextmanager
def _speculative_session(job: Job, config: EngineConfig, plain: EngineSession) -> Iterator[EngineSession]:
    job.progress("starting the speculative engine", 0, 1)
    with job.driver.start(config) as session:
        job.progress("starting the speculative engine", 1, 1)
        require_comparable(plain.hello, session.hello)
        yield session


def _generate(job: Job, session: EngineSession, stage: str, ids: Sequence[Sequence[int]], how: Sampling) -> Generated:
    return session.generate(ids, how, lambda done, total: job.progress(stage, done, total))


def _prove_greedy(job: Job, how: Sampling, drafter_independence: bool) -> ProveReport:
    with _plain_session(job, how.max_tokens) as (plain, ids):
        texts = _generate(job, plain, "plain", ids, how)
        own = _compare(job, job.config, plain, ids, texts, how)
        other = None
        if drafter_independence:
            with tempfile.TemporaryDirectory() as folder:
                shuffled = shuffle_drafter(Path(job.config.draft or ""), Path(folder) / "drafter")
                config = job.config.model_copy(update={"draft": str(shuffled)})
                other = _compare(job, config, plain, ids, texts, how)
        return _report(job, plain, own, drafter_independence=other)


def _compare(
    job: Job, config: EngineConfig, plain: EngineSession, ids: list[list[int]], texts: Generated, how: Sampling
) -> Comparison:
    with _speculative_session(job, config, plain) as session:
        drafted = _generate(job, session, "with speculation", ids, how)
    _require_rounds(drafted.counters)
    found = differences(plain, [p.id for p in job.prompts], ids, texts.completions, drafted.completions, config.dtype)
    pairs = zip(texts.completions, drafted.completions, strict=True)
    return Comparison(
        lossless=all(difference.verdict != "FAIL" for difference in found),
        tokens=sum(compared_tokens(a, b) for a, b in pairs),
        differences=found,
        emitted_per_round=drafted.counters.emitted_per_round,
        accepted_by_slot=drafted.counters.rates_by_slot,
    )


def _require_rounds(counters: Counters) -> None:
    # Without a round there was no speculation, and equal texts would prove nothing.
    if counters.rounds == 0:
        raise BadInput("the engine ran no speculative round: nothing to prove with texts this short")


def _prove_sampled(job: Job, temperature: float, samples: int) -> ProveReport:
    chosen = job.prompts[:: max(1, len(job.prompts) // SAMPLED_PROMPTS)][:SAMPLED_PROMPTS]
    job = Job(job.driver, job.config, chosen, job.findings, job.progress)
    how = Sampling(temperature=temperature, max_tokens=SAMPLED_TOKENS, ignore_eos=True)
    with _plain_session(job, SAMPLED_TOKENS) as (plain, ids):
        repeated = [row[-SAMPLED_CONTEXT:] for row in ids for _ in range(samples)]
        first = _generate(job, plain, "plain samples", repeated, how)
        # Independent arms: with one seed both would draw the same first tokens.
        config = job.config.model_copy(update={"seed": job.config.seed + 1})
        with _speculative_session(job, config, plain) as session:
            second = _generate(job, session, "speculative samples", repeated, how)
        _require_rounds(second.counters)
        arms = [[c.ids[1:] for c in generated.completions] for generated in (first, second)]
        pairs = [tuple(arm[start : start + samples] for arm in arms) for start in range(0, len(repeated), samples)]
        test = two_sample_test([(a, b) for a, b in pairs])
        comparison = Comparison(
            lossless=test.passed,
            tokens=second.tokens,
            differences=(),
            emitted_per_round=second.counters.emitted_per_round,
            accepted_by_slot=second.counters.rates_by_slot,
        )
        return _report(job, plain, comparison, temperature=temperature, test=test)


def _report(
    job: Job,
    plain: EngineSession,
    own: Comparison,
    *,
    temperature: float = 0.0,
    test: TwoSampleTest | None = None,
    drafter_independence: Comparison | None = None,
) -> ProveReport:
    return ProveReport(
        engine=plain.hello.engine,
        engine_version=plain.hello.version,
        target=job.config.target,
        draft=str(job.config.draft),
        k=job.k,
        dtype=job.config.dtype,
        temperature=temperature,
        concurrency=job.config.max_num_seqs,
        lossless=own.lossless and (drafter_independence is None or drafter_independence.lossless),
        prompts=len(job.prompts),
        tokens=own.tokens,
        differences=own.differences,
        test=test,
        emitted_per_round=own.emitted_per_round,
        accepted_by_slot=own.accepted_by_slot,
        drafter_independence=drafter_independence,
        findings=job.findings,
        flags=plain.hello.flags,
    )


def shuffle_drafter(source: Path, destination: Path) -> Path:
    """A drafter whose proposals are noise: every float tensor of ``source`` with its values in another order.

    Same shapes, dtypes and scales, so an engine loads it like the original; id maps stay as they are.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    destination.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, destination)
        elif file.suffix == ".safetensors":
            tensors = load_file(file)
            for name, tensor in tensors.items():
                if tensor.is_floating_point():
                    order = torch.randperm(tensor.numel(), generator=generator)
                    tensors[name] = tensor.flatten()[order].reshape(tensor.shape)
            save_file(tensors, destination / file.name)
    return destination


def _render(report: ProveReport, console: Console) -> None:
    mode = f"temperature {report.temperature:g}" if report.test else "greedy"
    console.print(
        f"{report.engine} {report.engine_version}, {mode}, {report.dtype}, K {report.k}, "
        f"batches of up to {report.concurrency}: {report.prompts} prompts, {report.tokens} tokens"
    )
    _render_comparison(report, console)
    if report.test:
        _render_test(report.test, console)
    if report.drafter_independence:
        console.print("With a drafter of shuffled weights:")
        _render_comparison(report.drafter_independence, console)
    console.print("[bold green]lossless[/]" if report.lossless else "[bold red]FAIL: not lossless[/]")


def _render_comparison(part: ProveReport | Comparison, console: Console) -> None:
    slots = " ".join(f"{rate:.3f}" for rate in part.accepted_by_slot)
    console.print(f"emitted per round {part.emitted_per_round:.3f}; accepted by slot {slots}")
    if not part.differences:
        return
    table = Table("prompt", "position", "gap", "allowed", "verdict", title="first differences")
    for d in part.differences:
        gap = "one text ended" if d.gap is None else f"{d.gap:.3g}"
        table.add_row(d.prompt, str(d.position), gap, f"{d.bound:.3g}", d.verdict)
    console.print(table)


def _render_test(test: TwoSampleTest, console: Console) -> None:
    console.print(
        f"two-sample test: p = {test.p:.4g} (alpha {test.alpha:g} fixed beforehand), statistic {test.statistic:.1f} in "
        f"{test.bins} bins, {test.samples} samples per arm; total variation seen {test.total_variation:.3f}, "
        f"found with chance {test.power:g} from {test.smallest_detectable_tv:.3f} on"
    )
