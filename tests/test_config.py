"""Drafter and target configurations: published layouts, and what users get wrong in them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_plugins.checkpoint import account, expected_tensors
from dflash_plugins.config import (
    DraftConfig,
    TargetConfig,
    read_draft_config,
    read_target_config,
    to_flat,
    to_nested,
)
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import Severity
from dflash_plugins.pair import (
    k_findings,
    pair_findings,
    read_tokenizer_vocabulary,
    served_prefix_lengths,
    serving_dtype_findings,
    tokenizer_findings,
)

FIXTURES = Path(__file__).parent / "fixtures" / "configs"
SLIDING, FULL = "sliding_attention", "full_attention"


def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def tiny(**changes: Any) -> dict[str, Any]:
    """A complete small configuration; a change to None removes the key, dotted names (as ``a__b``) go into sections."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "dflash_config": {"block_size": 8, "mask_token_id": 500, "target_layer_ids": [0, 2, 4]},
    }
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        holder = raw.setdefault(section, {}) if section else raw
        if value is None:
            holder.pop(key)
        else:
            holder[key] = value
    return raw


def target(**changes: Any) -> TargetConfig:
    values: dict[str, Any] = {"architecture": "T", "num_layers": 6, "hidden_size": 64, "vocab_size": 512}
    return TargetConfig(**values | {"rope_theta": 1e4} | changes)


def codes(findings: Any, severity: Severity | None = None) -> list[str]:
    return [f.code for f in findings if severity in (None, f.severity)]


def the(findings: Any, code: str) -> Any:
    (found,) = [f for f in findings if f.code == code]
    return found


# What each published file means, written down by hand.
# fmt: off
PINNED = {
    "legacy_top_level_b16": ("dflash", 16, 151669, (1, 9, 17, 25, 33), 1e6, (False,) * 5, (None,) * 5),
    "nested_mixed_layers_b16": ("dflash", 16, 248077, (1, 6, 11, 16, 22, 27, 32, 37), 1e7,
                                (True,) * 5 + (False,), (4096,) * 5 + (None,)),
    "dflash2_b8": ("dflash2", 8, 248070, (5, 19, 33, 47, 61), 1e7, (False,) * 5, (2048,) * 5),
    "dflash2_softcap_b16": ("dflash2", 16, 201818, (1, 13, 25, 37, 49), 5e5, (False,) * 5, (2048,) * 5),
    "use_swa_attention_sinks_b8": ("dflash", 8, 151669, (0, 15, 31, 47, 69), 1e4, (False,) * 5, (1024,) * 5),
    "speculators_dflash_b8": ("dflash", 8, 4, (0, 16, 28, 46, 57), 1e4, (False,) * 5, (None,) * 5),
    "speculators_dflash2_b8": ("dflash2", 8, 151669, (1, 9, 17, 25, 33), 1e6, (False,) * 5, (2048,) * 5),
    "ids_at_three_places_b16": ("dflash", 16, 248077, (1, 6, 11, 16, 22, 27, 32, 37), 1e7, (False,) * 6, (None,) * 6),
    "dloop_refine_b8": ("dloop", 8, 49151, (1, 8, 15, 22, 28), 1e5, (False,) * 2, (None,) * 2),
}
# fmt: on


@pytest.mark.parametrize("name", sorted(PINNED))
def test_a_published_layout_is_pinned(name: str) -> None:
    config = read_draft_config(FIXTURES / f"{name}.json").config
    assert config is not None
    seen = (config.method, config.block_size, config.mask_token_id, config.target_layer_ids, config.rope_theta)
    assert (*seen, config.causal, config.windows) == PINNED[name]
    assert config.rope_scaling is None


def test_every_fixture_is_pinned() -> None:
    assert {p.stem for p in FIXTURES.glob("*.json")} == set(PINNED)


@pytest.mark.parametrize("name", sorted(set(PINNED) - {"use_swa_attention_sinks_b8", "speculators_dflash_b8"}))
def test_published_layouts_leave_nothing_to_say(name: str) -> None:
    assert read_draft_config(FIXTURES / f"{name}.json").findings == ()


def test_dflash2_keys() -> None:
    config = read_draft_config(fixture("dflash2_softcap_b16")).require()
    assert config.selector is not None
    assert config.conv is not None
    assert (config.selector.top_k, config.selector.rank) == (16, 256)
    assert (config.conv.kernel_size, config.conv.group_size) == (2, 16)
    assert (config.output_multiplier, config.final_logit_softcapping) == (0.19611613513818404, 20.0)
    assert config.k == 15


def test_what_we_do_not_compute_is_refused_by_name() -> None:
    reading = read_draft_config(fixture("use_swa_attention_sinks_b8"))
    keys = [f.key for f in reading.findings if f.code == "config-unsupported"]
    assert keys == ["dflash_config.attention_sink_bias", "dflash_config.attention_value_scale", "partial_rotary_factor"]
    with pytest.raises(Refused, match="attention sinks"):
        reading.require()


def test_f01_missing_layer_ids_are_never_guessed() -> None:
    reading = read_draft_config(tiny(dflash_config__target_layer_ids=None, num_target_layers=64))
    missing = the(reading.findings, "config-missing")
    assert (missing.severity, missing.key) == (Severity.ERROR, "dflash_config.target_layer_ids")
    assert reading.config is None
    assert "target_layer_ids" not in reading.facts


def test_f02_speculators_ids_are_one_higher() -> None:
    nested = read_draft_config(tiny(dflash_config__target_layer_ids=[0, 16, 31])).require()
    raw = tiny(dflash_config__target_layer_ids=None, aux_hidden_state_layer_ids=[1, 17, 32])
    assert read_draft_config(raw).require().target_layer_ids == nested.target_layer_ids == (0, 16, 31)


def test_f02_both_spellings_must_agree() -> None:
    agree = tiny(eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    assert read_draft_config(agree).require().target_layer_ids == (0, 2, 4)
    differ = read_draft_config(tiny(eagle_aux_hidden_state_layer_ids=[0, 2, 4]))
    conflict = the(differ.findings, "config-conflict")
    assert conflict.key == "dflash_config.target_layer_ids and eagle_aux_hidden_state_layer_ids"


def test_f02_a_negative_layer_is_refused() -> None:
    raw = tiny(dflash_config__target_layer_ids=None, aux_hidden_state_layer_ids=[0, 2])
    assert the(read_draft_config(raw).findings, "target-layer-range").severity is Severity.ERROR


def test_f04_old_and_new_places_mean_the_same() -> None:
    old = tiny(block_size=16, rope_theta=1e7, dflash_config__block_size=None)
    new = tiny(dflash_config__block_size=16, rope_theta=None, rope_parameters={"rope_theta": 1e7})
    a, b = read_draft_config(old).require(), read_draft_config(new).require()
    assert a == b
    assert a.fingerprint == b.fingerprint
    assert (a.block_size, a.rope_theta) == (16, 1e7)


def test_f04c_two_block_sizes_name_both_places() -> None:
    conflict = the(read_draft_config(tiny(block_size=16, dflash_config__block_size=99)).findings, "config-conflict")
    assert conflict.severity is Severity.ERROR
    assert conflict.value == {"dflash_config.block_size": 99, "block_size": 16}


def test_two_thetas_name_both_places() -> None:
    raw = tiny(rope_parameters={"rope_theta": 1e6})
    conflict = the(read_draft_config(raw).findings, "config-conflict")
    assert conflict.value == {"rope_theta": 1e4, "rope_parameters.rope_theta": 1e6}


def test_rope_scaling_old_and_new_spelling() -> None:
    old = tiny(rope_scaling={"type": "yarn", "factor": 4.0})
    new = tiny(rope_theta=None, rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0})
    a, b = read_draft_config(old).require(), read_draft_config(new).require()
    assert a.rope_scaling == b.rope_scaling == {"rope_type": "yarn", "factor": 4.0}
    both = read_draft_config(new | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert codes(both.findings) == ["config-conflict"]


def test_missing_theta_is_not_defaulted() -> None:
    assert the(read_draft_config(tiny(rope_theta=None)).findings, "config-missing").key == "rope_theta"


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (7, []),
        (None, []),
        (5, [("k-below-block", "info")]),
        (8, [("k-beyond-block", "warning")]),
        (0, [("k-range", "error")]),
    ],
)
def test_f07_k_and_the_trained_block(k: int | None, expected: list[tuple[str, str]]) -> None:
    config = read_draft_config(tiny()).require()
    assert [(f.code, f.severity) for f in k_findings(config, k)] == expected


def test_f07_sixteen_on_a_block_of_sixteen_is_one_too_many() -> None:
    config = read_draft_config(fixture("legacy_top_level_b16")).require()
    assert codes(k_findings(config, 15)) == []
    assert codes(k_findings(config, 16), Severity.WARNING) == ["k-beyond-block"]


@pytest.mark.parametrize(
    ("mask", "code", "severity"),
    [
        (-1, "mask-token-range", "error"),
        (512, "mask-token-range", "error"),
        (2, "mask-token-shared", "warning"),
        (3, "mask-token-shared", "warning"),
        (True, "config-type", "error"),
        ("500", "config-type", "error"),
    ],
)
def test_f08_mask_ids(mask: Any, code: str, severity: str) -> None:
    raw = tiny(dflash_config__mask_token_id=mask, eos_token_id=[7, 2], pad_token_id=3)
    found = the(read_draft_config(raw).findings, code)
    assert (found.severity, found.key) == (severity, "dflash_config.mask_token_id")


def test_f08_null_and_absent_mask_ids() -> None:
    raw = tiny()
    raw["dflash_config"]["mask_token_id"] = None
    assert the(read_draft_config(raw).findings, "mask-token-null").severity is Severity.ERROR
    del raw["dflash_config"]["mask_token_id"]
    assert the(read_draft_config(raw).findings, "config-missing").key == "dflash_config.mask_token_id"


def test_f08_an_id_past_the_tokenizer_but_inside_the_embedding_is_fine() -> None:
    config = read_draft_config(tiny(dflash_config__mask_token_id=511)).require()
    assert pair_findings(config, target(eos_token_ids=(2,), pad_token_id=0)) == []


def test_f08_the_target_has_the_last_word() -> None:
    config = read_draft_config(tiny()).require()
    assert codes(pair_findings(config, target(vocab_size=400))) == ["pair-vocabulary", "mask-token-range"]
    assert codes(pair_findings(config, target(eos_token_ids=(9, 500)))) == ["mask-token-shared"]


def test_f12_tokenizers_that_differ_in_one_id() -> None:
    ours = {f"t{i}": i for i in range(12)}
    theirs = {("other" if i == 7 else f"t{i}"): i for i in range(12)}
    (found,) = tokenizer_findings(ours, theirs)
    assert (found.severity, found.value) == (Severity.ERROR, [7])


def test_f12_padding_rows_are_fine() -> None:
    ours = {f"t{i}": i for i in range(12)}
    assert tokenizer_findings(ours, ours | {"<|mask|>": 12}) == []
    assert tokenizer_findings(ours, {k: v for k, v in ours.items() if v != 5})[0].value == [5]


def test_tokenizer_files_with_added_tokens(tmp_path: Path) -> None:
    raw = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert read_tokenizer_vocabulary(tmp_path) == {"a": 0, "b": 1, "<s>": 2}
    assert read_tokenizer_vocabulary(tmp_path / "none") is None


def test_f13_theta_ratio() -> None:
    (found,) = pair_findings(read_draft_config(tiny()).require(), target(rope_theta=1e6))
    assert (found.code, found.severity) == ("pair-rope-theta", Severity.WARNING)
    assert "ratio of 100" in found.message


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({"layer_types": [SLIDING, FULL]}, (True, False)),
        ({"layer_types": [SLIDING, FULL], "is_causal": False}, (False, False)),
        ({"layer_types": [SLIDING, FULL], "is_causal": True}, (True, True)),
        ({"layer_types": [SLIDING, SLIDING]}, (True, True)),
        ({"layer_types": [SLIDING, SLIDING], "dflash_config__causal": False}, (False, False)),
        ({"layer_types": [FULL, FULL], "dflash_config__causal": True}, (True, True)),
        ({"layer_types": [FULL, FULL], "dflash_config__causal": True, "is_causal": False}, (False, False)),
        ({}, (False, False)),
        ({"dflash_config__use_swa": True}, (False, False)),
    ],
)
def test_f15_causality_precedence(changes: dict[str, Any], causal: tuple[bool, bool]) -> None:
    config = read_draft_config(tiny(sliding_window=6, **changes)).config
    assert config is not None
    assert config.causal == causal


def test_f15_two_contradicting_places_are_named() -> None:
    reading = read_draft_config(tiny(is_causal=False, dflash_config__causal=True))
    found = the(reading.findings, "config-conflict")
    assert (found.severity, found.key) == (Severity.WARNING, "is_causal and dflash_config.causal")


def test_windows() -> None:
    mixed = read_draft_config(tiny(layer_types=[SLIDING, FULL], sliding_window=6)).require()
    assert mixed.windows == (6, None)
    everywhere = read_draft_config(tiny(dflash_config__use_swa=True, dflash_config__swa_window_size=9)).require()
    assert everywhere.windows == (9, 9)
    both = tiny(dflash_config__use_swa=True, dflash_config__swa_window_size=9, sliding_window=6)
    assert the(read_draft_config(both).findings, "config-conflict").value == {
        "dflash_config.swa_window_size": 9,
        "sliding_window": 6,
    }
    assert codes(read_draft_config(tiny(layer_types=[SLIDING, FULL])).findings) == ["window-missing"]


@pytest.mark.parametrize("types", [[SLIDING], [SLIDING, "linear_attention"]])
def test_layer_types_must_fit(types: list[str]) -> None:
    assert codes(read_draft_config(tiny(layer_types=types, sliding_window=6)).findings) == ["layer-types"]


def test_layer_types_are_not_derived() -> None:
    raw = tiny(use_sliding_window=True, sliding_window=6)
    assert codes(read_draft_config(raw).findings) == ["layer-types"]


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ("float16", "error"),
        ("torch.float16", "error"),
        ("half", "error"),
        ("bfloat16", None),
        ("auto", None),
        ("float32", "info"),
        (None, None),
    ],
)
def test_f17_bf16_weights_served_as_fp16(served: str | None, expected: str | None) -> None:
    assert [f.severity for f in serving_dtype_findings("bfloat16", served)] == ([expected] if expected else [])


@pytest.mark.parametrize("name", sorted(PINNED))
def test_f20_flat_and_nested_are_the_same(name: str) -> None:
    config = read_draft_config(fixture(name)).config
    assert config is not None
    assert read_draft_config(to_nested(config)).config == config
    assert read_draft_config(to_flat(config)).config == config


def test_f20_the_flat_keys_come_back() -> None:
    raw = fixture("speculators_dflash2_b8")
    nested = to_nested(read_draft_config(raw).require())
    draft = {"block_size": 8, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "conv_kernel_size": 2}
    assert nested["dflash_config"] == draft | {"conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    assert nested["is_causal"] is False
    back = to_flat(read_draft_config(nested).require())
    keys = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "conv_kernel_size", "conv_group_size")
    keys += ("selector_rank", "selector_top_k", "draft_vocab_size", "sliding_window_non_causal", "dtype")
    assert {k: back[k] for k in keys} == {k: raw[k] for k in keys}


def test_speculators_sliding_causality_is_not_defaulted() -> None:
    raw = fixture("speculators_dflash2_b8")
    del raw["sliding_window_non_causal"]
    assert the(read_draft_config(raw).findings, "config-missing").key == "sliding_window_non_causal"
    raw["sliding_window_non_causal"] = False
    raw["transformer_layer_config"]["layer_types"] = [SLIDING] * 4 + [FULL]
    reading = read_draft_config(raw)
    assert reading.require().causal == (True,) * 4 + (False,)
    assert codes(reading.findings) == ["speculators-causality"]


def test_a_flat_key_is_reported_where_the_user_wrote_it() -> None:
    raw = fixture("speculators_dflash2_b8")
    raw["transformer_layer_config"]["hidden_size"] = "4096"
    found = the(read_draft_config(raw).findings, "config-type")
    assert found.key == "transformer_layer_config.hidden_size"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("DFlash2BeamDraftModel", "architecture-foreign", "no engine version was seen"),
        ("XPressDraftModel", "architecture-foreign", "XPress"),
        ("Qwen3XPressModel", "architecture-foreign", "XPress"),
        ("LiLiCorrDraftModel", "architecture-foreign", "seen served by vllm 0.31.0"),
        ("MuseGlimmerAssistantModel", "architecture-foreign", "seen served by vllm 0.31.0"),
        ("DFlashMuseGlimmerAssistantModel", "architecture-foreign", "Muse"),
        ("Qwen3_5MTP", "architecture-foreign", "method mtp"),
        ("DeepSeekMTPModel", "architecture-foreign", "method mtp"),
        ("Eagle3LlamaForCausalLM", "architecture-foreign", "method eagle3"),
        ("LlamaForCausalLMEagle3", "architecture-foreign", "method eagle3"),
        ("PEagleDraftModel", "architecture-foreign", "parallel drafting"),
        ("Qwen3DSparkModel", "architecture-foreign", "method dspark"),
        ("Qwen3ForCausalLM", "architecture-foreign", "whole language model"),
        ("NobodyKnowsMe", "architecture-unknown", "DFlash2DraftModel"),
    ],
)
def test_f23_architectures_known_by_name(name: str, code: str, words: str) -> None:
    reading = read_draft_config(tiny(architectures=[name]))
    found = the(reading.findings, code)
    assert found.severity is Severity.ERROR
    assert words in str(found)
    assert reading.config is None


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dspark", "mtp"])
def test_f23_speculators_of_another_kind(kind: str) -> None:
    raw = fixture("speculators_dflash_b8") | {"speculators_model_type": kind}
    assert the(read_draft_config(raw).findings, "architecture-foreign").value == kind


def test_f09_everything_at_once() -> None:
    raw = tiny(architectures=["NobodyKnowsMe"], vocab_size=None, block_size=16, typo_key=1)
    reading = read_draft_config(raw)
    assert codes(reading.findings) == [
        "architecture-unknown",
        "config-missing",
        "config-conflict",
        "config-unknown-key",
    ]
    with pytest.raises(Refused) as refused:
        reading.require()
    assert len(refused.value.findings) == 4
    assert all(f.code in str(refused.value) for f in reading.findings)


def test_unknown_keys_are_named_with_their_path() -> None:
    raw = tiny(dflash_config__swa_windw_size=4, transformers_version="5.2.0", use_cache=True, initializer_range=0.02)
    raw |= {"transformer_layer_config": {"hidden_sise": 3}, "num_anchors": 512, "blocksize": 8}
    unknown = [f for f in read_draft_config(raw).findings if f.code == "config-unknown-key"]
    assert [f.key for f in unknown] == [
        "dflash_config.swa_windw_size",
        "transformer_layer_config.hidden_sise",
        "blocksize",
    ]
    assert {f.severity for f in unknown} == {Severity.WARNING}


def test_scaling_keys_nested_first_then_top_level() -> None:
    assert read_draft_config(tiny(input_embedding_scale=3.0)).require().input_embedding_scale == 3.0
    reading = read_draft_config(tiny(output_multiplier=3.0, dflash_config__output_multiplier=0.5))
    assert reading.require().output_multiplier == 0.5
    assert the(reading.findings, "config-conflict").severity is Severity.WARNING
    assert read_draft_config(tiny(dflash_config__final_logit_softcapping=0.0)).require().final_logit_softcapping is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 0), ("num_hidden_layers", -1), ("rms_norm_eps", 0.0), ("max_position_embeddings", 0)],
)
def test_values_out_of_range_become_findings(key: str, value: float) -> None:
    reading = read_draft_config(tiny(**{key: value}))
    assert reading.config is None
    assert [f.key for f in reading.findings if f.severity is Severity.ERROR] == [key]


@pytest.mark.parametrize("value", ["64", 64.0, None, True, [64]])
def test_a_size_must_be_an_integer(value: Any) -> None:
    raw = tiny()
    raw["hidden_size"] = value
    reading = read_draft_config(raw)
    assert reading.config is None
    assert "hidden_size" in [f.key for f in reading.findings]


def test_head_dim_is_derived_only_where_engines_agree() -> None:
    assert read_draft_config(tiny(head_dim=None)).require().head_dim == 16
    assert the(read_draft_config(tiny(head_dim=None, model_type="qwen3")).findings, "config-missing").key == "head_dim"
    wide = tiny(head_dim=None, model_type="qwen3", hidden_size=512)
    assert read_draft_config(wide).require().head_dim == 128


def test_dflash2_needs_its_keys_and_dflash_must_not_have_them() -> None:
    reading = read_draft_config(tiny(architectures=["DFlash2DraftModel"], dflash_config__selector_rank=8))
    missing = {f.key for f in reading.findings if f.code == "config-missing"}
    assert missing == {f"dflash_config.{k}" for k in ("selector_top_k", "conv_kernel_size", "conv_group_size")}
    silent = tiny(dflash_config__selector_rank=8, dflash_config__selector_top_k=4)
    assert codes(read_draft_config(silent).findings) == ["method-conflict"]


def test_conv_groups_must_divide_the_hidden_size() -> None:
    raw = tiny(architectures=["DLoopDraftModel"], dflash_config__conv_kernel_size=2, dflash_config__conv_group_size=48)
    raw["dflash_config"]["dloop"] = {"mode": "refine", "prefix_lengths": []}
    assert codes(read_draft_config(raw).findings) == ["conv-group"]


def dloop(loop: Any) -> dict[str, Any]:
    return tiny(architectures=["DLoopDraftModel"], dflash_config__dloop=loop)


def test_dloop_modes() -> None:
    refine = read_draft_config(dloop({"mode": "refine", "prefix_lengths": [1, 3]})).require()
    assert refine.loop is not None
    assert (refine.method, refine.loop.mode, refine.loop.prefix_lengths) == ("dloop", "refine", (1, 3))
    extend = read_draft_config(dloop({"mode": "extend", "max_loops": 3, "gate": -0.75})).require()
    assert extend.loop is not None
    assert (extend.loop.max_loops, extend.loop.gate) == (3, -0.75)
    assert codes(k_findings(extend, 21)) == []
    assert codes(k_findings(extend, 20)) == ["k-part-block"]
    assert codes(k_findings(extend, 22)) == ["k-beyond-block"]
    for config in (refine, extend):
        assert read_draft_config(to_nested(config)).require() == config
        assert read_draft_config(to_flat(config)).require() == config


def test_dloop_name_as_vllm_spells_it() -> None:
    loop = {"mode": "refine", "prefix_lengths": []}
    raw = dloop(loop) | {"architectures": ["DFlashDLoopDraftModel"]}
    assert read_draft_config(raw).require() == read_draft_config(dloop(loop)).require()


@pytest.mark.parametrize(
    ("loop", "code"),
    [
        ({"mode": "refine", "prefix_lengths": [0, 3]}, "loop-prefix-lengths"),
        ({"mode": "refine", "prefix_lengths": [3, 3]}, "loop-prefix-lengths"),
        ({"mode": "refine", "prefix_lengths": [3, 1]}, "loop-prefix-lengths"),
        ({"mode": "refine", "prefix_lengths": [7]}, "loop-prefix-lengths"),
        ({"mode": "refine", "prefix_lengths": [1.0]}, "loop-prefix-lengths"),
        ({"mode": "refine", "prefix_lengths": 3}, "loop-prefix-lengths"),
        ({"mode": "refine"}, "config-missing"),
        ({"mode": "refine", "prefix_lengths": [1], "gate": 1}, "loop-key"),
        ({"mode": "extend", "max_loops": 0, "gate": -0.5}, "loop-extend"),
        ({"mode": "extend", "max_loops": 2, "gate": "x"}, "loop-extend"),
        ({"mode": "expand"}, "loop-mode"),
    ],
)
def test_dloop_values_that_are_refused(loop: dict[str, Any], code: str) -> None:
    assert codes(read_draft_config(dloop(loop)).findings, Severity.ERROR) == [code]


def test_dloop_needs_its_key_and_others_must_not_have_it() -> None:
    assert the(read_draft_config(tiny(architectures=["DLoopDraftModel"])).findings, "config-missing").key.endswith(
        "dloop"
    )
    raw = tiny(dflash_config__dloop={"mode": "refine", "prefix_lengths": [1]})
    assert codes(read_draft_config(raw).findings) == ["method-conflict"]


@pytest.mark.parametrize(
    ("k", "kept", "dropped"), [(7, (1, 3), False), (4, (1, 3), False), (3, (1,), True), (1, (), True)]
)
def test_prefix_lengths_that_reach_the_served_k_are_dropped(k: int, kept: tuple[int, ...], dropped: bool) -> None:
    config = read_draft_config(dloop({"mode": "refine", "prefix_lengths": [1, 3]})).require()
    lengths, findings = served_prefix_lengths(config, k)
    assert lengths == kept
    assert codes(findings) == (["loop-prefix-dropped"] if dropped else [])
    assert served_prefix_lengths(read_draft_config(tiny()).require(), k) == ((), [])


def test_pair_sizes() -> None:
    config = read_draft_config(tiny(num_target_layers=6)).require()
    assert codes(pair_findings(config, target(), own_embedding=False)) == []
    assert codes(pair_findings(config, target(hidden_size=128))) == ["pair-hidden-size"]
    assert codes(pair_findings(config, target(num_layers=4))) == ["pair-target-layers", "target-layer-range"]
    assert the(pair_findings(config, target(vocab_size=513)), "pair-vocabulary").severity is Severity.ERROR


def test_a_narrow_drafter_needs_its_own_embedding() -> None:
    config = read_draft_config(tiny(target_hidden_size=128)).require()
    assert codes(pair_findings(config, target(hidden_size=128), own_embedding=True)) == []
    assert codes(pair_findings(config, target(hidden_size=128), own_embedding=False)) == ["pair-hidden-size"]


def test_fingerprint_follows_the_meaning() -> None:
    config = read_draft_config(tiny()).require()
    assert config.fingerprint == read_draft_config(tiny(use_cache=True, typo=1)).require().fingerprint
    assert config.fingerprint.startswith("sha256:")
    for change in ({"dflash_config__mask_token_id": 499}, {"is_causal": True}, {"dflash_config__block_size": 9}):
        assert read_draft_config(tiny(**change)).require().fingerprint != config.fingerprint


def test_the_description_is_frozen() -> None:
    config = read_draft_config(tiny()).require()
    with pytest.raises(ValueError, match="frozen"):
        config.block_size = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs"):
        DraftConfig(**config.model_dump(), surprise=1)


def test_reading_leaves_the_source_alone() -> None:
    for path in FIXTURES.glob("*.json"):
        raw = json.loads(path.read_text())
        before = copy.deepcopy(raw)
        read_draft_config(raw)
        assert raw == before


@pytest.mark.parametrize(
    ("content", "words"), [("{", "line 1"), ("[1]", "list, not an object"), (b"\xff\xfe\x00", "cannot be read")]
)
def test_unreadable_files_name_the_path(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (read_draft_config, read_target_config):
        with pytest.raises(BadInput, match=words) as error:
            read(tmp_path)
        assert str(file) in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=True) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["mode", "rope_theta", "x"]), inner),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_value_of_any_key_raises(data: st.DataObject) -> None:
    raw = fixture(data.draw(st.sampled_from(sorted(PINNED)), "fixture"))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = data.draw(st.sampled_from([raw, *(v for v in raw.values() if isinstance(v, dict) and v)]))
        holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(JSON)
    reading = read_draft_config(raw)
    assert reading.config is not None or any(f.severity is Severity.ERROR for f in reading.findings)
    assert {f.code for f in account(reading.facts, {}).findings} <= {"tensor-missing"}
    json.dumps([f.model_dump(mode="json") for f in reading.findings])
    if reading.config is not None:
        assert expected_tensors(reading.config) == expected_tensors(reading.facts)
        assert read_draft_config(to_nested(reading.config)).config == reading.config


def test_missing_paths_are_named(tmp_path: Path) -> None:
    for read in (read_draft_config, read_target_config):
        with pytest.raises(BadInput, match="does not exist"):
            read(tmp_path / "nowhere")
        with pytest.raises(BadInput, match=r"holds no config\.json"):
            read(tmp_path)


def test_targets(tmp_path: Path) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": 2, "rope_theta": 1e5, "dtype": "bfloat16"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    seen = read_target_config(tmp_path)
    assert (seen.num_layers, seen.eos_token_ids, seen.rope_theta, seen.dtype) == (30, (2, 0), 1e5, "bfloat16")


def test_a_target_with_a_text_part(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    text = {"num_hidden_layers": 60, "hidden_size": 5376, "vocab_size": 262144, "rope_parameters": rope}
    raw = {"architectures": ["GemmaForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    seen = read_target_config(tmp_path)
    assert (seen.hidden_size, seen.rope_theta, seen.eos_token_ids) == (5376, 1e6, (1, 106))


def test_an_incomplete_target_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused) as refused:
        read_target_config(tmp_path)
    assert {f.key for f in refused.value.findings} == {"architecture", "num_layers", "hidden_size", "vocab_size"}


def test_reading_imports_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, dflash_plugins.check, dflash_plugins.matrix\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'sglang', 'vllm_ext') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
