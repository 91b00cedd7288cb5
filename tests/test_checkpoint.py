"""Checkpoints: every tensor claimed or named, wrong files refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from dflash_plugins.check import check_pair, inspect_pair, units_findings
from dflash_plugins.checkpoint import (
    Header,
    account,
    extra_file_findings,
    id_map_findings,
    load_tensors,
    read_header,
)
from dflash_plugins.config import DraftConfig, read_draft_config
from dflash_plugins.engines import Launch
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import Severity, errors

RAW: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "dtype": "float32",
    "dflash_config": {"block_size": 4, "mask_token_id": 15, "target_layer_ids": [0, 2]},
}
SHAPES: dict[str, tuple[int, ...]] = {
    "fc.weight": (8, 16),
    "hidden_norm.weight": (8,),
    "norm.weight": (8,),
    "layers.0.self_attn.q_proj.weight": (16, 8),
    "layers.0.self_attn.k_proj.weight": (8, 8),
    "layers.0.self_attn.v_proj.weight": (8, 8),
    "layers.0.self_attn.o_proj.weight": (8, 16),
    "layers.0.self_attn.q_norm.weight": (4,),
    "layers.0.self_attn.k_norm.weight": (4,),
    "layers.0.mlp.gate_proj.weight": (12, 8),
    "layers.0.mlp.up_proj.weight": (12, 8),
    "layers.0.mlp.down_proj.weight": (8, 12),
    "layers.0.input_layernorm.weight": (8,),
    "layers.0.post_attention_layernorm.weight": (8,),
}
DFLASH2_SHAPES = {
    "layers.0.attention_conv.base_kernel": (2, 3, 8),
    "layers.0.attention_conv.kernel_projection.weight": (24, 8),
    "layers.0.mlp_conv.base_kernel": (2, 3, 8),
    "layers.0.mlp_conv.kernel_projection.weight": (24, 8),
    "candidate_selector.predecessor_codebook": (16, 5),
    "candidate_selector.successor_codebook": (16, 5),
    "candidate_selector.hidden_projection.weight": (5, 8),
}


def raw_config(**changes: Any) -> dict[str, Any]:
    return {**RAW, "dflash_config": dict(RAW["dflash_config"]), **changes}


def config(**changes: Any) -> DraftConfig:
    return read_draft_config(raw_config(**changes)).require()


def dflash2() -> DraftConfig:
    raw = raw_config(architectures=["DFlash2DraftModel"])
    raw["dflash_config"] |= {"conv_kernel_size": 3, "conv_group_size": 2, "selector_top_k": 4, "selector_rank": 5}
    return read_draft_config(raw).require()


def header(shapes: dict[str, tuple[int, ...]] | None = None, dtype: str = "F32", **more: tuple[int, ...]) -> Header:
    return {name: (dtype, shape) for name, shape in {**(shapes or SHAPES), **more}.items()}


def found(accounting: Any) -> list[tuple[str, str]]:
    return [(f.code, f.key) for f in accounting.findings]


def write(directory: Path, raw: dict[str, Any] | None = None, drop: str = "", **more: np.ndarray) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw or raw_config()))
    tensors = {n: np.full(s, i, np.float32) for i, (n, s) in enumerate(SHAPES.items()) if n != drop} | more
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_the_released_layout_is_accounted_for() -> None:
    accounting = account(config(), header())
    assert found(accounting) == []
    assert accounting.claimed == {name: name for name in SHAPES}
    assert (accounting.dtype, accounting.own_embedding, accounting.own_head) == ("float32", False, False)


def test_dflash2_adds_convolutions_and_the_selector() -> None:
    accounting = account(dflash2(), header(SHAPES | DFLASH2_SHAPES))
    assert found(accounting) == []
    assert set(accounting.claimed) == SHAPES.keys() | DFLASH2_SHAPES.keys()
    missing = account(dflash2(), header())
    assert found(missing) == [("tensor-missing", name) for name in DFLASH2_SHAPES]


def test_a_plain_drafter_does_not_swallow_dflash2_tensors() -> None:
    extra = account(config(), header(SHAPES | DFLASH2_SHAPES))
    assert found(extra) == [("tensor-unclaimed", name) for name in sorted(DFLASH2_SHAPES)]


def test_f18_aliases() -> None:
    stored = {f"model.{n}": s for n, s in (SHAPES | DFLASH2_SHAPES).items() if "codebook" not in n}
    stored |= {f"{n}.weight": s for n, s in DFLASH2_SHAPES.items() if "codebook" in n}
    accounting = account(dflash2(), header(stored))
    assert found(accounting) == []
    name = "candidate_selector.predecessor_codebook"
    assert accounting.claimed[name] == f"{name}.weight"
    assert accounting.claimed["fc.weight"] == "model.fc.weight"


def test_f18_both_spellings_at_once() -> None:
    name = "candidate_selector.predecessor_codebook"
    accounting = account(dflash2(), header(SHAPES | DFLASH2_SHAPES | {f"{name}.weight": (16, 5)}))
    assert found(accounting) == [("tensor-twice", name)]
    assert accounting.findings[0].value == [name, f"{name}.weight"]


def test_f18_unclaimed_and_missing_are_both_named() -> None:
    shapes = {n: s for n, s in SHAPES.items() if n != "layers.0.mlp.down_proj.weight"}
    accounting = account(config(), header(shapes | {"layers.0.attn_gate.weight": (8, 8)}))
    expected = [("tensor-unclaimed", "layers.0.attn_gate.weight"), ("tensor-missing", "layers.0.mlp.down_proj.weight")]
    assert found(accounting) == expected
    with pytest.raises(Refused, match=r"attn_gate(.|\n)*down_proj"):
        accounting.require()


def test_a_layer_too_many_is_unclaimed() -> None:
    accounting = account(config(), header(SHAPES | {"layers.1.input_layernorm.weight": (8,)}))
    assert found(accounting) == [("tensor-unclaimed", "layers.1.input_layernorm.weight")]


def test_biases_belong_to_attention_bias_only() -> None:
    sizes = {"q": 16, "k": 8, "v": 8, "o": 8}
    biases = {f"layers.0.self_attn.{n}_proj.bias": (size,) for n, size in sizes.items()}
    assert found(account(config(attention_bias=True), header(SHAPES | biases))) == []
    assert len(found(account(config(attention_bias=True), header()))) == 4
    assert {code for code, _ in found(account(config(), header(SHAPES | biases)))} == {"tensor-unclaimed"}


def test_wrong_fc_width_says_expected_and_found() -> None:
    accounting = account(config(), header(SHAPES | {"fc.weight": (8, 24)}))
    (finding,) = accounting.findings
    assert (finding.code, finding.value) == ("fc-width", [8, 24])
    assert "[8, 24]" in finding.message
    assert "[8, 16]" in finding.message


def test_f09_one_report_with_all_three(tmp_path: Path) -> None:
    raw = raw_config(architectures=["NobodyKnowsMe"])
    del raw["vocab_size"]
    directory = write(tmp_path / "d", raw, **{"fc.weight": np.zeros((8, 24), np.float32)})
    found_here = check_pair(directory)
    seen = {(f.code, f.key) for f in errors(found_here)}
    expected = {("architecture-unknown", "architectures"), ("config-missing", "vocab_size"), ("fc-width", "fc.weight")}
    assert seen == expected


def test_own_head_with_its_map() -> None:
    full = config(draft_vocab_size=4)
    good = header(SHAPES | {"lm_head.weight": (4, 8)}) | {"d2t": ("I64", (4,)), "t2d": ("BOOL", (16,))}
    accounting = account(full, good)
    assert found(accounting) == []
    assert accounting.own_head
    assert found(account(full, header(SHAPES | {"lm_head.weight": (4, 8)}))) == [("tensor-missing", "d2t")]
    assert found(account(full, header())) == [("tensor-missing", "lm_head.weight"), ("tensor-missing", "d2t")]
    floats = account(full, good | {"d2t": ("F32", (4,))})
    assert found(floats) == [("tensor-dtype", "d2t")]


def test_a_reduced_head_without_draft_vocab_size() -> None:
    accounting = account(config(), header(SHAPES | {"lm_head.weight": (4, 8)}) | {"d2t": ("I64", (4,))})
    assert found(accounting) == [("tensor-unclaimed", "d2t"), ("tensor-shape", "lm_head.weight")]


def test_own_embedding_and_full_head_are_optional() -> None:
    own = account(config(), header(SHAPES | {"embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8)}))
    assert found(own) == []
    assert (own.own_embedding, own.own_head) == (True, True)
    same = account(config(draft_vocab_size=16), header())
    assert found(same) == []


def test_f28_quantised_fc() -> None:
    parts = {"fc.weight_packed": (8, 2), "fc.weight_scale": (8, 1), "fc.weight_shape": (2,)}
    shapes = {n: s for n, s in SHAPES.items() if n != "fc.weight"}
    accounting = account(config(), header(shapes | parts))
    assert found(accounting) == [("tensor-quantised", "fc.weight")]
    assert accounting.findings[0].value == sorted(parts)
    fp8 = account(config(), header() | {"fc.weight": ("F8_E4M3", (8, 16))})
    assert found(fp8) == [("tensor-dtype", "fc.weight")]


@pytest.mark.parametrize(
    ("written", "stored", "effective", "codes"),
    [
        ("bfloat16", "F16", "float16", ["dtype-config"]),
        (None, "BF16", "bfloat16", []),
        ("bfloat16", "BF16", "bfloat16", []),
    ],
)
def test_f14_the_tensors_decide_the_dtype(written: str | None, stored: str, effective: str, codes: list[str]) -> None:
    accounting = account(config(dtype=written), header(dtype=stored))
    assert accounting.dtype == effective
    assert [f.code for f in accounting.findings] == codes
    assert not errors(accounting.findings)


def test_f14_mixed_dtypes_warn() -> None:
    accounting = account(config(dtype="bfloat16"), header(dtype="BF16") | {"norm.weight": ("F32", (8,))})
    assert (accounting.dtype, [f.code for f in accounting.findings]) == ("bfloat16", ["dtype-mixed"])


def test_files_are_read_and_loaded(tmp_path: Path) -> None:
    directory = write(tmp_path / "d")
    assert read_header(directory) == header()
    tensors = load_tensors(directory, account(config(), read_header(directory)))
    assert {n: tuple(t.shape) for n, t in tensors.items()} == SHAPES
    assert [float(tensors[name].flatten()[0]) for name in SHAPES] == [float(i) for i in range(len(SHAPES))]


def test_bfloat16_headers_need_no_torch_dtype(tmp_path: Path) -> None:
    save_torch({"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert read_header(tmp_path) == {"model.norm.weight": ("BF16", (8,))}


def test_loading_refuses_what_accounting_found(tmp_path: Path) -> None:
    directory = write(tmp_path / "d", drop="norm.weight")
    with pytest.raises(Refused, match=r"norm\.weight"):
        load_tensors(directory, account(config(), read_header(directory)))


def shard(directory: Path, **index: str) -> None:
    names = list(SHAPES)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({n: np.zeros(SHAPES[n], np.float32) for n in part}, directory / file)
    weights = {n: file for file, part in parts.items() for n in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights | index}))


def test_sharded_checkpoints(tmp_path: Path) -> None:
    shard(tmp_path)
    assert read_header(tmp_path) == header()
    assert set(load_tensors(tmp_path, account(config(), read_header(tmp_path)))) == set(SHAPES)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"fc.weight": "b.safetensors"}, "disagree about fc.weight"),
        ({"more.weight": "a.safetensors"}, "disagree about more.weight"),
        ({"fc.weight": "c.safetensors"}, "not beside it: c.safetensors"),
        ({"fc.weight": "../a.safetensors"}, r"not beside it: \.\./a"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, index: dict[str, str], words: str) -> None:
    shard(tmp_path, **index)
    with pytest.raises(BadInput, match=words):
        read_header(tmp_path)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    directory = write(tmp_path / "d")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BadInput, match="no complete safetensors file") as error:
        read_header(directory)
    assert str(file) in str(error.value)


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_header(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadInput, match="is a pickle and is not read"):
        read_header(tmp_path)


def test_f10_the_id_map_leads_into_the_vocabulary(tmp_path: Path) -> None:
    raw = raw_config(draft_vocab_size=4)
    head = {"lm_head.weight": np.zeros((4, 8), np.float32)}
    good = write(tmp_path / "good", raw, **head, d2t=np.array([0, 2, 5, 9]))  # draft 3 is target 12
    accounting = account(config(draft_vocab_size=4), read_header(good))
    assert id_map_findings(good, accounting, 16) == []
    assert [f.code for f in id_map_findings(good, accounting, 12)] == ["id-map"]
    twice = write(tmp_path / "twice", raw, **head, d2t=np.array([0, 0, 0, -1]))  # 0, 1, 2, 2
    (finding,) = id_map_findings(twice, accounting, 16)
    assert "1 ids twice" in finding.message
    assert "id-map" in {f.code for f in check_pair(twice)}


def test_f24_a_separate_mask_embedding(tmp_path: Path) -> None:
    assert extra_file_findings(tmp_path) == []
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    (finding,) = extra_file_findings(tmp_path)
    assert (finding.severity, finding.key) == (Severity.WARNING, "mask_embedding.pt")


def target(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    raw = {"architectures": ["T"], "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 16, "rope_theta": 1e4}
    (directory / "config.json").write_text(json.dumps(raw | changes))
    return directory


def test_a_fitting_pair_has_nothing_to_report(tmp_path: Path) -> None:
    report = inspect_pair(write(tmp_path / "d"), target(tmp_path / "t"), k=3, engine="vllm", launch=Launch("0.31.0"))
    assert report.findings == ()
    assert report.require() == config()
    assert report.dtype == "float32"


def test_a_report_holds_every_reason_errors_first(tmp_path: Path) -> None:
    draft = write(tmp_path / "d", raw_config(typo=1, dtype="bfloat16"), drop="norm.weight")
    other = target(tmp_path / "t", hidden_size=32, vocab_size=20, rope_theta=1e6, num_hidden_layers=2)
    report = inspect_pair(draft, other, k=9, served_dtype="float16")
    assert [(f.code, f.severity) for f in report.findings] == [
        ("tensor-missing", "error"),
        ("pair-hidden-size", "error"),
        ("target-layer-range", "error"),
        ("pair-vocabulary", "error"),
        ("dtype-range", "error"),
        ("config-unknown-key", "warning"),
        ("dtype-config", "warning"),
        ("pair-rope-theta", "warning"),
        ("k-beyond-block", "warning"),
    ]
    with pytest.raises(Refused):
        report.require()


def test_differing_tokenizers_are_found_in_the_files(tmp_path: Path) -> None:
    draft, other = write(tmp_path / "d"), target(tmp_path / "t")
    for directory, token in ((draft, "x"), (other, "y")):
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, token: 1}}}))
    assert [f.code for f in check_pair(draft, other)] == ["pair-tokenizer"]


@pytest.mark.parametrize(
    ("engine", "flag", "value", "k", "expected"),
    [
        ("vllm", "num_speculative_tokens", 7, 7, None),
        ("sglang", "speculative_num_draft_tokens", 8, 7, None),
        ("sglang", "speculative_num_draft_tokens", 7, None, ("units-other-engine", "did you mean 8?")),
        ("vllm", "num_speculative_tokens", 8, None, ("units-other-engine", "did you mean 7?")),
        ("sglang", "speculative_num_draft_tokens", 7, 7, ("units-conflict", "give one of the two")),
        ("vllm", "num_speculative_tokens", 5, None, None),
        ("vllm", "speculative_num_draft_tokens", 8, 7, None),
    ],
)
def test_f06_one_number_two_meanings(
    engine: str, flag: str, value: int, k: int | None, expected: tuple[str, str] | None
) -> None:
    raw = raw_config()
    raw["dflash_config"]["block_size"] = 8
    found_here = units_findings(engine, read_draft_config(raw).require(), k, {flag: value})
    assert [(f.code, f.mend) for f in found_here] == ([expected] if expected else [])


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(BadInput, match="Git LFS pointer"):
        read_header(tmp_path)
