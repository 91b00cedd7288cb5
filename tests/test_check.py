"""``check``: published pairs are fine, every fault is found alone and among others, and nothing makes it stumble."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from published import PUBLISHED, Pair, mimo, mixed_layers, qwen3_8b, qwen36_35b_retrain, qwen38_27b_dflash2
from rich.console import Console

from dflash_plugins.findings import Severity
from dflash_plugins.report import CheckReport

SERVED_BY = {
    "muse_glimmer_assistant": {"vllm"}, "laguna": {"vllm"}, "speculators_dflash": {"vllm"},
    "speculators_dflash2": {"vllm"},
}  # fmt: skip
ENGINES = (("vllm", "0.31.0"), ("vllm", "0.32.0"), ("sglang", "0.5.21"), ("sglang", "0.5.23"))


def found(report: CheckReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.severity.value) for finding in report.findings}


def screen(report: CheckReport, width: int = 100) -> str:
    console = Console(width=width, height=40, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    report.render(console)
    return console.export_text()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_a_published_pair_has_no_error(tmp_path: Path, name: str, engine: str, version: str) -> None:
    if engine not in SERVED_BY.get(name, {engine}):
        pytest.skip("no version of this engine was seen to read this layout")
    pair = PUBLISHED[name]()
    pair.engine, pair.version = engine, version
    started = time.process_time()
    report = pair.check(tmp_path / "pair")
    assert time.process_time() - started < 2
    assert [f.code for f in report.findings if f.severity is Severity.ERROR] == []
    assert report.launch


@pytest.mark.parametrize("name", ["muse_glimmer_assistant", "laguna", "mimo"])
def test_what_only_the_engine_computes_is_said(tmp_path: Path, name: str) -> None:
    report = PUBLISHED[name]().check(tmp_path / "pair")
    assert report.verdict == "engine-alone"
    assert report.exit_code == 0
    assert "engine alone" in screen(report)


def test_on_a_cpu_the_plugin_is_in_the_way_of_it(tmp_path: Path) -> None:
    pair = mimo()
    pair.settings["device"] = "cpu"
    assert ("config-unsupported", "error") in found(pair.check(tmp_path / "pair"))


@pytest.mark.parametrize("name", ["speculators_dflash", "speculators_dflash2"])
def test_sglang_does_not_read_the_flat_layout(tmp_path: Path, name: str) -> None:
    pair = PUBLISHED[name]()
    pair.engine, pair.version = "sglang", "0.5.21"
    assert ("sglang-flat-layout", "error") in found(pair.check(tmp_path / "pair"))


def test_headers_without_data_are_enough(tmp_path: Path) -> None:
    report = qwen38_27b_dflash2().check(tmp_path / "pair", data=False)
    assert (report.exit_code, ("headers-only", "info") in found(report)) == (0, True)


# -- faults


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_alone_is_found(tmp_path: Path, fault: Fault) -> None:
    pair = qwen38_27b_dflash2()
    before = found(pair.check(tmp_path / "right"))
    fault.change(pair)
    report = pair.check(tmp_path / "wrong")
    (named, *_) = [f for f in report.findings if f.code == fault.code and f.severity.value == fault.severity] or [None]
    assert named is not None, found(report) - before
    assert fault.words in f"{named.key} {named.message} {named.mend}"
    assert report.exit_code == (1 if Severity.ERROR in {f.severity for f in report.findings} else 0)
    assert bool(report.launch) is (report.exit_code == 0)
    assert named.message
    assert named.mend


def test_every_missing_tensor_is_named(tmp_path: Path) -> None:
    pair = qwen38_27b_dflash2()
    missing = [name for name in pair.draft_header if name.startswith("layers.1.")]
    for name in missing:
        del pair.draft_header[name]
    report = pair.check(tmp_path / "pair")
    assert [f.key for f in report.findings if f.code == "tensor-missing"] == missing


def test_three_faults_at_once_are_all_found(tmp_path: Path) -> None:
    """300 seeded triples of faults that do not touch the same thing."""
    chosen = random.Random(20261130)
    triples = []
    while len(triples) < 300:
        three = chosen.sample(FAULTS, 3)
        if all(not {*a.touches} & {*b.touches} for a, b in itertools.combinations(three, 2)):
            triples.append(three)
    lost = []
    for number, three in enumerate(triples):
        pair = qwen38_27b_dflash2()
        for fault in three:
            fault.change(pair)
        report = pair.check(tmp_path / str(number), data=False)
        lost += [
            (fault.name, [other.name for other in three])
            for fault in three
            if fault.code not in {finding.code for finding in report.findings}
        ]
    assert lost == [], "\n".join(map(str, lost))


# -- what another engine, runner or drafter makes of it


@pytest.mark.parametrize(
    ("settings", "code", "severity"),
    [
        ({"pp_size": 2}, "sglang-pipeline-parallel", "error"),
        ({"pipeline_parallel_size": 2}, "sglang-pipeline-parallel", "error"),
        ({"enable_dp_attention": True}, "sglang-dp-attention", "error"),
        ({"dp_size": 2}, "sglang-data-parallel", "warning"),
        ({"tp_size": 3}, "tensor-parallel", "error"),
        ({"speculative_accept_threshold_single": 0.9}, "sglang-accept-threshold-single", "error"),
        ({"speculative_accept_threshold_acc": 0.5}, "sglang-accept-threshold-acc", "error"),
        ({"speculative_num_draft_tokens": 7}, "units-other-engine", "warning"),
        ({"speculative_dflash_block_size": 7}, "units-other-engine", "warning"),
        ({"speculative_eagle_topk": 4}, "sglang-eagle-topk", "warning"),
        ({"speculative_draft_window_size": 4}, "draft-window", "error"),
        ({"speculative_draft_attention_backend": "torch_flex"}, "attention-backend", "warning"),
        ({"quantization": "fp8"}, "sglang-draft-quantised-too", "warning"),
        ({"speculative_draft_model_quantization": "fp8"}, "sglang-draft-quantised", "warning"),
        ({"mamba_radix_cache_strategy": "no_buffer"}, "sglang-hybrid-no-buffer", "error"),
        ({"context_length": 524288}, "positions-served", "warning"),
        ({"enable_deterministic_inference": True}, "sglang-deterministic", "warning"),
        ({"enable_lora": True}, "sglang-lora", "warning"),
        ({"disaggregation_mode": "prefill"}, "sglang-disaggregation", "warning"),
        ({"device": "cpu", "attention_backend": "fa3"}, "sglang-cpu-backend", "error"),
        ({"device": "cpu", "page_size": 16}, "sglang-cpu-page-size", "error"),
        ({"dtype": "float16"}, "dtype-range", "error"),
    ],
)
def test_what_sglang_is_asked_for(tmp_path: Path, settings: dict[str, object], code: str, severity: str) -> None:
    pair = qwen38_27b_dflash2()
    pair.engine, pair.version, pair.settings = "sglang", "0.5.21", dict(settings)
    assert (code, severity) in found(pair.check(tmp_path / "pair"))


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"quantization": "fp8", "speculative_draft_model_quantization": "unquant"}, "sglang-draft-quantised-too"),
        ({"speculative_draft_model_quantization": "unquant"}, "sglang-draft-quantised"),
        ({"mamba_radix_cache_strategy": "no_buffer", "disable_radix_cache": True}, "sglang-hybrid-no-buffer"),
        ({"speculative_accept_threshold_single": 1.0}, "sglang-accept-threshold-single"),
        ({"speculative_num_draft_tokens": 8}, "units-other-engine"),
        ({"sampling_defaults": "openai"}, "sglang-generation-min-p"),
    ],
)
def test_what_sglang_may_be_asked_for(tmp_path: Path, settings: dict[str, object], lost: str) -> None:
    pair = qwen38_27b_dflash2()
    pair.engine, pair.version, pair.settings = "sglang", "0.5.21", dict(settings)
    pair.generation |= {"min_p": 0.1}
    assert lost not in {code for code, _ in found(pair.check(tmp_path / "pair"))}


def test_sampling_defaults_that_sglang_ignores(tmp_path: Path) -> None:
    pair = qwen3_8b()
    pair.engine, pair.version = "sglang", "0.5.21"
    pair.generation = {"min_p": 0.1, "repetition_penalty": 1.05}
    seen = found(pair.check(tmp_path / "pair"))
    assert {("sglang-generation-min-p", "warning"), ("sglang-generation-penalty", "warning")} <= seen


@pytest.mark.parametrize("override", [{"generation_config": "vllm"}, {"override_generation_config": {"min_p": 0}}])
def test_min_p_by_default_can_be_mended_on_vllm(tmp_path: Path, override: dict[str, object]) -> None:
    pair = qwen3_8b()
    pair.generation, pair.settings = {"min_p": 0.1}, dict(override)
    assert pair.check(tmp_path / "pair").exit_code == 0


@pytest.mark.parametrize(
    ("settings", "version", "expected"),
    [
        ({"runner": "v1"}, "0.31.0", ("vllm-v1-mixed-layers", "error")),
        ({"device": "cpu"}, "0.31.0", ("vllm-v1-mixed-layers", "error")),
        ({"device": "cuda"}, "0.31.0", None),
        ({"runner": "v2"}, "0.25.0", ("vllm-mixed-layers-early", "error")),
    ],
)
def test_f22_mixed_layers(
    tmp_path: Path, settings: dict[str, object], version: str, expected: tuple[str, str] | None
) -> None:
    pair = mixed_layers()
    pair.version, pair.settings = version, dict(settings)
    seen = {entry for entry in found(pair.check(tmp_path / "pair")) if "mixed" in entry[0]}
    assert seen == ({expected} if expected else set())


def dloop(mode: dict[str, object]) -> Pair:
    pair = qwen36_35b_retrain()
    pair.draft["architectures"] = ["DLoopDraftModel"]
    pair.draft["dflash_config"]["dloop"] = mode
    return pair


def test_a_loop_needs_the_plugin_and_a_mode_that_is_served(tmp_path: Path) -> None:
    refine = found(dloop({"mode": "refine", "prefix_lengths": [1, 3]}).check(tmp_path / "refine"))
    assert ("plugin-needed", "info") in refine
    assert not [code for code, severity in refine if severity == "error"]
    extend = dloop({"mode": "extend", "max_loops": 3, "gate": -0.75})
    extend.k = 45
    seen = found(extend.check(tmp_path / "extend"))
    assert ("loop-mode", "error") in seen
    assert not [code for code, _ in seen if code.startswith("k-")]
    short = dloop({"mode": "refine", "prefix_lengths": [1, 3]})
    short.k = 2
    assert ("loop-prefix-dropped", "warning") in found(short.check(tmp_path / "short"))


def test_a_padded_vocabulary_is_said_to_be_one(tmp_path: Path) -> None:
    pair = qwen3_8b()
    pair.draft["vocab_size"] = 152064
    (named,) = [f for f in pair.check(tmp_path / "pair").findings if f.code == "pair-vocabulary"]
    assert "padded" in named.message
