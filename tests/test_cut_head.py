"""A reduced head left out and put back: the same drafter, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from dflash_plugins.drafter import load_drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.pairs.cut_head import VOCABULARY_FILE, attach_head, detach_head


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny target, and a drafter whose 40 rows of head are the target's."""
    target = tiny.write_target(tmp_path / "target")
    raw = tiny.raw_config(draft_vocab_size=40)
    weights = tiny.tensors(raw)
    ids = torch.arange(40) + weights["d2t"]
    weights["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"][ids]
    return target, tiny.write_drafter(tmp_path / "drafter", raw, weights)


def test_the_head_comes_back_as_it_was(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = pair
    detach_head(drafter, tmp_path / "shipped")
    attach_head(tmp_path / "shipped", target, tmp_path / "made")
    before, after = load_file(drafter / "model.safetensors"), load_file(tmp_path / "made" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert json.loads((tmp_path / "made" / "config.json").read_text())["draft_vocab_size"] == 40


def test_the_shipped_drafter_is_whole_by_itself(pair: tuple[Path, Path], tmp_path: Path) -> None:
    detach_head(pair[1], tmp_path / "shipped")
    loaded = load_drafter(tmp_path / "shipped")
    assert loaded.config.draft_vocab_size is None
    assert loaded.lm_head is None


def test_nothing_to_leave_out_is_said(tmp_path: Path) -> None:
    drafter = tiny.write_drafter(tmp_path / "drafter", tiny.raw_config())
    with pytest.raises(BadInput, match="no reduced head"):
        detach_head(drafter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ids", ["oops", [3, 2], [1, 1], [], [-1, 2], [0, 512]])
def test_a_broken_vocabulary_is_refused(pair: tuple[Path, Path], tmp_path: Path, ids: object) -> None:
    detach_head(pair[1], tmp_path / "shipped")
    (tmp_path / "shipped" / VOCABULARY_FILE).write_text(json.dumps({"target_ids": ids}))
    with pytest.raises(BadInput, match=VOCABULARY_FILE):
        attach_head(tmp_path / "shipped", pair[0], tmp_path / "made")
    assert not (tmp_path / "made").exists()
