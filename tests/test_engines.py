"""What is known of the engines, as data: readable, complete, and right where faults are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dflash_plugins.config import DraftReading, read_draft_config
from dflash_plugins.engines import (
    ENGINES,
    EngineFacts,
    Launch,
    engine_facts,
    engine_findings,
    foreign_architectures,
    known_bugs,
    parse_version,
)
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Severity

FIXTURES = Path(__file__).parent / "fixtures" / "configs"


def reading(name: str, **changes: Any) -> DraftReading:
    raw = json.loads((FIXTURES / f"{name}.json").read_text())
    nested = {k.removeprefix("dflash_config__"): v for k, v in changes.items() if k.startswith("dflash_config__")}
    raw |= {k: v for k, v in changes.items() if not k.startswith("dflash_config__")}
    raw["dflash_config"] = raw.get("dflash_config", {}) | nested if nested else raw.get("dflash_config", {})
    return read_draft_config(raw)


def found(engine: str, read: DraftReading, **launch: str) -> list[tuple[str, str]]:
    assert read.config is not None
    return [(f.code, f.severity) for f in engine_findings(engine, read.config, Launch(**launch), read.origins)]


@pytest.mark.parametrize("engine", ENGINES)
def test_files_are_valid_and_sourced(engine: str) -> None:
    facts = engine_facts(engine)
    assert facts.engine == engine
    ids = [x.id for x in (*facts.limits, *facts.bugs)]
    assert len(set(ids)) == len(ids)
    assert all(x.source for x in (*facts.architectures, *facts.limits, *facts.bugs))
    assert {a.name for a in facts.architectures} == {"DFlashDraftModel", "DFlash2DraftModel", "DLoopDraftModel"}
    for version in (v for a in facts.architectures for v in (*a.seen, *filter(None, [a.first]))):
        assert parse_version(version) is not None


def test_an_unknown_key_in_a_file_is_refused() -> None:
    data = engine_facts("vllm").model_dump()
    with pytest.raises(ValidationError, match="surprise"):
        EngineFacts.model_validate(data | {"surprise": 1})
    limit = data["limits"][0] | {"when": {"moon": "full"}}
    with pytest.raises(ValidationError, match="moon"):
        EngineFacts.model_validate(data | {"limits": [limit]})


def test_an_unknown_engine_is_bad_input() -> None:
    with pytest.raises(BadInput, match="known: vllm, sglang"):
        engine_facts("tgi")


def test_f06_units() -> None:
    assert engine_facts("vllm").tokens(7) == 7
    assert engine_facts("sglang").tokens(7) == 8


def test_the_three_cpu_bugs() -> None:
    bugs = known_bugs("vllm", "cpu", "0.31.0")
    assert [b.id for b in bugs] == ["vllm-cpu-context-k-norm", "vllm-cpu-expand-kernel", "vllm-cpu-rejection-kernel"]
    assert [b.switch for b in bugs] == [
        "DFLASH_PLUGINS_NO_MEND_CONTEXT_K_NORM",
        "DFLASH_PLUGINS_NO_MEND_EXPAND_KERNEL",
        "DFLASH_PLUGINS_NO_MEND_REJECTION_KERNEL",
    ]
    assert known_bugs("vllm", "cuda") == ()
    assert known_bugs("sglang", "cpu") == ()


def test_the_switches_are_those_the_adapter_reads() -> None:
    source = (Path(__file__).parents[1] / "vllm_ext" / "plugin.py").read_text()
    for bug in engine_facts("vllm").bugs:
        assert f'"{bug.switch}"' in source


def test_bugs_are_named_where_they_show() -> None:
    read = reading("legacy_top_level_b16")
    assert found("vllm", read, platform="cuda", version="0.31.0") == []
    assert found("vllm", read, platform="cpu", version="0.31.0") == [
        ("vllm-cpu-context-k-norm", "info"),
        ("vllm-cpu-expand-kernel", "info"),
        ("vllm-cpu-rejection-kernel", "info"),
    ]


@pytest.mark.parametrize("text", ["0.28.1rc1.dev43+g6f7df92a8", "0.21.0+empty"])
def test_f21_version_strings_parse(text: str) -> None:
    assert parse_version(text) is not None
    assert parse_version("main") is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.21.0+empty", [("engine-too-old", "error")]),
        ("0.27.1", [("engine-too-old", "error")]),
        ("0.28.0rc1.dev5", [("engine-too-old", "warning")]),
        ("0.28.0", []),
        ("0.28.1rc1.dev43+g6f7df92a8", []),
        ("main", [("engine-version-unknown", "warning")]),
    ],
)
def test_f21_an_engine_older_than_the_architecture(version: str, expected: list[tuple[str, str]]) -> None:
    assert found("vllm", reading("dflash2_b8"), version=version, runner="v2") == expected


def test_f21_the_finding_names_the_first_version_and_the_plugin() -> None:
    read = reading("dflash2_b8")
    assert read.config is not None
    finding = engine_findings("vllm", read.config, Launch("0.21.0", "v2"), read.origins)[0]
    assert "0.28.0" in finding.message
    assert "plugin" in finding.mend
    assert found("vllm", reading("legacy_top_level_b16"), version="0.19.0") == [("engine-too-old", "error")]
    assert found("sglang", reading("dflash2_b8"), version="0.5.18") == [("engine-too-old", "error")]


@pytest.mark.parametrize(
    ("launch", "severity"),
    [
        ({"runner": "v1"}, "error"),
        ({"runner": "v2"}, None),
        ({"platform": "cpu"}, "error"),
        ({"platform": "cuda"}, None),
        ({}, "warning"),
    ],
)
def test_f22_mixed_layers_on_the_v1_runner(launch: dict[str, str], severity: str | None) -> None:
    here = [f for f in found("vllm", reading("nested_mixed_layers_b16"), **launch) if f[0] == "vllm-v1-mixed-layers"]
    assert here == ([("vllm-v1-mixed-layers", severity)] if severity else [])


def test_uniform_layers_are_fine_on_v1() -> None:
    assert found("vllm", reading("legacy_top_level_b16"), runner="v1") == []


def test_the_selector_needs_v2_or_the_plugin() -> None:
    assert found("vllm", reading("dflash2_b8"), runner="v1") == [("vllm-v1-selector", "info")]


def test_scaling_that_vllm_does_not_read() -> None:
    plain = reading("legacy_top_level_b16", dflash_config__output_multiplier=0.5)
    assert found("vllm", plain, runner="v1") == [("vllm-ignores-scaling", "warning")]
    assert found("vllm", reading("dflash2_softcap_b16"), runner="v2") == []
    flat = reading("speculators_dflash2_b8", output_multiplier=0.5)
    assert found("vllm", flat, runner="v2") == [("vllm-reads-scaling-nested-only", "warning")]


def test_what_sglang_does_not_read() -> None:
    scaled = reading("dflash2_b8", dflash_config__input_embedding_scale=2.0)
    assert found("sglang", scaled) == [("sglang-ignores-embedding-scale", "warning")]
    nested = reading("legacy_top_level_b16", dflash_config__causal=True)
    assert found("sglang", nested) == [("sglang-ignores-nested-causal", "warning")]
    both = reading("legacy_top_level_b16", dflash_config__causal=True, is_causal=True)
    assert found("sglang", both) == []


def test_f10_sglang_does_not_ignore_an_own_head_silently() -> None:
    read = reading("speculators_dflash_b8")
    assert ("sglang-ignores-own-head", "warning") in found("sglang", read)
    assert "sglang-ignores-own-head" not in dict(found("sglang", reading("legacy_top_level_b16")))


def test_foreign_patterns_do_not_catch_ours() -> None:
    ours = {"DFlashDraftModel", "DFlash2DraftModel", "DLoopDraftModel", "DFlashDLoopDraftModel"}
    for name in ours:
        read = reading("dloop_refine_b8", architectures=[name])
        assert not [f for f in read.findings if f.code.startswith("architecture")]
    assert all(f.what and f.mend for f in foreign_architectures())


def test_findings_carry_a_mend() -> None:
    read = reading("nested_mixed_layers_b16")
    assert read.config is not None
    for finding in engine_findings("vllm", read.config, Launch(runner="v1", platform="cpu"), read.origins):
        assert finding.mend
        assert finding.severity in set(Severity)
