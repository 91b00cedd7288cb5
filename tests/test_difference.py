"""A drafter shipped as what differs from another: the same drafter comes back, and only from its own base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from dflash_plugins.check import check_pair
from dflash_plugins.drafter import load_drafter
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import errors
from dflash_plugins.pairs.cut_head import VOCABULARY_FILE
from dflash_plugins.pairs.difference import (
    DIFFERENCE_FILE,
    apply_difference,
    make_difference,
    read_difference,
    require_fitting,
)
from dflash_plugins.pairs.rounded import GROUP

SUCCESSORS = "candidate_selector.successor_codebook"
DFLASH2 = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
IDS = [3, 5, 500]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tiny.write_drafter(tmp_path / "base", tiny.raw_config())
    (folder / VOCABULARY_FILE).write_text(json.dumps({"target_ids": IDS}))
    return folder


def write_trained(folder: Path, base: Path, method: str = "dflash2") -> Path:
    """A drafter with the base's tensors, one of them changed, and its own new ones; it knows three successors."""
    raw = tiny.raw_config("dflash2", **DFLASH2) if method == "dflash2" else tiny.raw_config(method)
    weights = tiny.tensors(raw, seed=1) | load_file(base / "model.safetensors")
    weights["layers.1.self_attn.q_proj.weight"] = weights["layers.1.self_attn.q_proj.weight"] * 2
    if method == "dflash2":
        known = weights[SUCCESSORS][IDS]
        weights[SUCCESSORS] = torch.zeros_like(weights[SUCCESSORS])
        weights[SUCCESSORS][IDS] = known
    tiny.write_drafter(folder, raw, weights)
    shutil.copyfile(base / VOCABULARY_FILE, folder / VOCABULARY_FILE)
    (folder / "README.md").write_text("a card")
    return folder


def test_only_what_differs_is_shipped_and_all_comes_back(base: Path, tmp_path: Path) -> None:
    trained = write_trained(tmp_path / "trained", base)
    make_difference(trained, base, "base", tmp_path / "shipped")
    stored = load_file(tmp_path / "shipped" / "model.safetensors")
    added = {name for name in load_file(trained / "model.safetensors") if "conv" in name or "selector" in name}
    assert stored.keys() == {"layers.1.self_attn.q_proj.weight", SUCCESSORS + ".rows", *added}
    assert stored[SUCCESSORS].shape == (3, 8)
    assert stored[SUCCESSORS + ".rows"].tolist() == IDS

    require_fitting(tmp_path / "shipped", base, "base")
    apply_difference(tmp_path / "shipped", base, tmp_path / "made")
    before, after = load_file(trained / "model.safetensors"), load_file(tmp_path / "made" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    for name in ("config.json", VOCABULARY_FILE):
        assert json.loads((tmp_path / "made" / name).read_text()) == json.loads((trained / name).read_text())
    assert (tmp_path / "made" / "README.md").read_text() == "a card"
    assert errors(check_pair(tmp_path / "made")) == ()
    assert load_drafter(tmp_path / "made").config.method == "dflash2"


def test_another_architecture_over_the_same_tensors_ships_its_configuration(base: Path, tmp_path: Path) -> None:
    make_difference(write_trained(tmp_path / "trained", base, "dloop"), base, "base", tmp_path / "shipped")
    assert list(load_file(tmp_path / "shipped" / "model.safetensors")) == ["layers.1.self_attn.q_proj.weight"]
    apply_difference(tmp_path / "shipped", base, tmp_path / "made")
    assert load_drafter(tmp_path / "made").config.method == "dloop"


def test_equal_numbers_of_other_bits_differ(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights["norm.weight"][0] = 0.0
    save_file(weights, base / "model.safetensors")
    trained = write_trained(tmp_path / "trained", base, "dloop")
    weights = load_file(trained / "model.safetensors")
    weights["norm.weight"][0] = -0.0
    save_file(weights, trained / "model.safetensors")
    make_difference(trained, base, "base", tmp_path / "shipped")
    assert "norm.weight" in load_file(tmp_path / "shipped" / "model.safetensors")


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "base/model.safetensors", f"base/{VOCABULARY_FILE}"]
)
def test_a_file_that_is_another_is_refused_by_name(base: Path, tmp_path: Path, file: str) -> None:
    make_difference(write_trained(tmp_path / "trained", base), base, "base", tmp_path / "shipped")
    path = tmp_path / file if file.startswith("base/") else tmp_path / "shipped" / file
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(Refused) as caught:
        require_fitting(tmp_path / "shipped", base, "base")
    assert [finding.key for finding in caught.value.findings] == [f"{path.parent.name}/{path.name}"]


def test_all_wrong_files_are_named_at_once(base: Path, tmp_path: Path) -> None:
    make_difference(write_trained(tmp_path / "trained", base), base, "base", tmp_path / "shipped")
    (tmp_path / "shipped" / "config.json").write_text("{}")
    (base / "model.safetensors").unlink()
    with pytest.raises(Refused) as caught:
        require_fitting(tmp_path / "shipped", base, "base")
    assert {f.key: f.value is None for f in caught.value.findings} == {
        "shipped/config.json": False,
        "base/model.safetensors": True,
    }


@pytest.mark.parametrize(
    "text", ["", "{", "{}", '{"base": 1}', '{"base": "base", "base_sha256": {}, "sha256": {}, "x": 1}']
)
def test_a_broken_description_is_refused(base: Path, tmp_path: Path, text: str) -> None:
    (base / DIFFERENCE_FILE).write_text(text)
    with pytest.raises(BadInput, match=DIFFERENCE_FILE):
        read_difference(base)


def test_another_base_or_none_is_refused(base: Path, tmp_path: Path) -> None:
    make_difference(write_trained(tmp_path / "trained", base), base, "base", tmp_path / "shipped")
    for folder, name in ((tmp_path / "shipped", "other"), (base, "base")):
        with pytest.raises(BadInput, match="not shipped as a difference"):
            require_fitting(folder, base, name)


def test_what_a_difference_cannot_say_is_refused_when_it_is_made(base: Path, tmp_path: Path) -> None:
    trained = write_trained(tmp_path / "trained", base)
    make_difference(trained, base, "base", tmp_path / "shipped")
    with pytest.raises(BadInput, match="must be whole"):
        make_difference(trained, tmp_path / "shipped", "shipped", tmp_path / "out")
    with pytest.raises(BadInput, match=r"lacks candidate_selector"):
        make_difference(base, trained, "trained", tmp_path / "out")
    (trained / VOCABULARY_FILE).write_text(json.dumps({"target_ids": [1, 2]}))
    with pytest.raises(BadInput, match="other tokens"):
        make_difference(trained, base, "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_changes_rounded_to_four_bits_come_back_near(tmp_path: Path) -> None:
    base = tmp_path / "base"
    raw = tiny.raw_config()
    weights = {name: tensor.bfloat16() for name, tensor in tiny.tensors(raw).items()}
    tiny.write_drafter(base, raw, weights)
    trained = {name: (tensor + 0.1 * torch.randn_like(tensor)).bfloat16() for name, tensor in weights.items()}
    tiny.write_drafter(tmp_path / "trained", raw, trained)
    make_difference(tmp_path / "trained", base, "base", tmp_path / "shipped", rounded=True)
    rounded = read_difference(tmp_path / "shipped").rounded
    wide = [name for name, tensor in weights.items() if tensor.dim() == 2 and tensor.shape[1] % GROUP == 0]
    assert wide
    assert sorted(wide) == list(rounded)
    apply_difference(tmp_path / "shipped", base, tmp_path / "made")
    made, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "shipped"))
    for name, tensor in trained.items():
        if name not in rounded:
            assert torch.equal(made[name], tensor), name
            continue
        assert stored[name + ".codes"].nbytes * 4 == tensor.nbytes
        change = (tensor.float() - weights[name].float()).unflatten(1, (-1, GROUP))
        step = change.abs().amax(-1, keepdim=True) / 7
        error = (made[name].float() - tensor.float()).unflatten(1, (-1, GROUP)).abs()
        assert bool((error <= 0.51 * step + 0.01 * tensor.float().abs().unflatten(1, (-1, GROUP))).all()), name
    apply_difference(tmp_path / "shipped", base, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], made[name]) for name in made)


def test_a_tensor_that_did_not_change_takes_no_room_when_rounded(base: Path, tmp_path: Path) -> None:
    trained = write_trained(tmp_path / "trained", base)
    make_difference(trained, base, "base", tmp_path / "shipped", rounded=True)
    stored = load_file(tmp_path / "shipped" / "model.safetensors")
    kept = {name for name in stored if not any(part in name for part in ("conv", "selector"))}
    assert {name.split(".codes")[0].split(".scales")[0] for name in kept} == {"layers.1.self_attn.q_proj.weight"}
