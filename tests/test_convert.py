"""``convert``: the same drafter in the other published layout, and what became of everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from dflash_plugins import cli
from dflash_plugins.config import read_draft_config
from dflash_plugins.convert import convert
from dflash_plugins.drafter import load_drafter
from dflash_plugins.errors import BadInput, Refused

METHODS = ("dflash", "dflash2")


def written(path: Path, raw: dict[str, Any]) -> Path:
    return tiny.write_drafter(path, raw)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_drafter(path).state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_there_and_back_it_is_the_same_drafter(tmp_path: Path, method: str) -> None:
    source = written(tmp_path / "a", tiny.raw_config(method, draft_vocab_size=64))
    convert(source, tmp_path / "b", "speculators")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["speculators_model_type"] == method
    assert raw["aux_hidden_state_layer_ids"] == [i + 1 for i in tiny.TAPS]
    assert "dflash_config" not in raw
    convert(tmp_path / "b", tmp_path / "c", "released")
    configs = [read_draft_config(tmp_path / name).require() for name in "abc"]
    assert configs[0] == configs[1] == configs[2]
    first, *others = (tensors(tmp_path / name) for name in "abc")
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)


def test_every_key_is_accounted_for(tmp_path: Path) -> None:
    raw = tiny.raw_config("dflash", use_cache=True, is_causal=False, draft={"typo": 3, "final_logit_softcapping": 30.0})
    source = written(tmp_path / "a", raw)
    report = convert(source, tmp_path / "b", "speculators")
    found = {key.key: (key.fate, key.places) for key in report.keys}
    assert set(found) == {k for k in raw if k != "dflash_config"} | {f"dflash_config.{k}" for k in raw["dflash_config"]}
    assert found["block_size"] == ("written", ("block_size",))
    assert found["hidden_size"] == ("written", ("transformer_layer_config.hidden_size",))
    assert found["dflash_config.target_layer_ids"] == ("written", ("aux_hidden_state_layer_ids",))
    assert found["dflash_config.final_logit_softcapping"][0] == "written"
    assert found["use_cache"] == ("idle", ())
    assert found["dflash_config.typo"] == ("unknown", ())
    assert found["rope_theta"][0] in ("written", "implied")
    codes = {one.code for one in report.findings}
    assert "vllm-ignores-scaling" in codes


def test_every_tensor_and_file_is_accounted_for(tmp_path: Path) -> None:
    raw = tiny.raw_config("dflash")
    source = written(tmp_path / "a", raw)
    (source / "tokenizer.json").write_text("{}")
    (source / "mask_embedding.pt").write_bytes(b"")
    (source / "README.md").write_text("a card")
    report = convert(source, tmp_path / "b", "speculators")
    assert set(report.tensors) == set(tiny.tensors(raw))
    assert report.files == ("README.md", "tokenizer.json")
    assert report.files_left == ("mask_embedding.pt",)
    assert (tmp_path / "b" / "README.md").read_text() == "a card"


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    loop = written(tmp_path / "loop", tiny.raw_config("dloop"))
    with pytest.raises(BadInput, match="speculators layout has no D-Loop"):
        convert(loop, tmp_path / "out", "speculators")
    broken = written(tmp_path / "broken", tiny.raw_config("dflash", vocab_size=96))
    with pytest.raises(Refused, match="mask-token-range"):
        convert(broken, tmp_path / "out", "speculators")
    with pytest.raises(BadInput, match="known are released, speculators"):
        convert(loop, tmp_path / "out", "gguf")
    with pytest.raises(BadInput, match="exists already"):
        convert(loop, broken, "released")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "loop"]


def test_the_loop_goes_on_in_the_released_layout(tmp_path: Path) -> None:
    source = written(tmp_path / "a", tiny.raw_config("dloop"))
    convert(source, tmp_path / "b", "released")
    assert read_draft_config(tmp_path / "b").require() == read_draft_config(source).require()


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "a", tiny.raw_config("dflash2"))
    assert cli.main(["convert", str(source), str(tmp_path / "b"), "--to", "speculators"]) == 0
    assert "dflash_config.target_layer_ids -> aux_hidden_state_layer_ids" in capsys.readouterr().out
    assert cli.main(["convert", str(source), str(tmp_path / "c"), "--to", "speculators", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "c")
    assert cli.main(["convert", str(source), str(tmp_path / "c"), "--to", "speculators"]) == 2
