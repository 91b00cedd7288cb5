"""Putting trained drafters into the data distribution: whole or as a difference, never in a way that fetches badly."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from dflash_plugins.pairs.catalogue import EmbeddedDrafter
from dflash_plugins.pairs.difference import DIFFERENCE_FILE, read_difference
from dflash_plugins.train.answers import Answer, build_store

NAMES = {
    "plain": EmbeddedDrafter("plain", "dflash", "target"),
    "looped": EmbeddedDrafter("looped", "dloop", "target", base="plain"),
}


@pytest.fixture
def ship(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script over an empty distribution in a repository of its own, with two names and a tiny target."""
    spec = importlib.util.spec_from_file_location("ship_drafter", repository / "ci" / "ship_drafter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = tiny.write_target(tmp_path / "target")
    (tmp_path / "repository" / "data").mkdir(parents=True)
    git(tmp_path / "repository", "init", "-q")
    git(tmp_path / "repository", "commit", "-q", "--allow-empty", "-m", "nothing yet")
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "repository" / "data")
    monkeypatch.setattr(module, "DRAFTERS", NAMES)
    monkeypatch.setattr(module, "resolve", lambda name: target)
    return module


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=Tester", "-c", "user.email=tester@localhost"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def write_trained(folder: Path, target: Path, method: str, scale: float = 1.0) -> Path:
    """A drafter whose 40 rows of head are the target's and whose final norm is ``scale`` times that of the others."""
    raw = tiny.raw_config(method, draft_vocab_size=40)
    weights = tiny.tensors(raw)
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    weights["lm_head.weight"] = head[torch.arange(40) + weights["d2t"]]
    weights["norm.weight"] = weights["norm.weight"] * scale
    return tiny.write_drafter(folder, raw, weights)


def test_a_base_and_then_a_difference_to_it(
    ship: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_trained(tmp_path / "p", tmp_path / "target", "dflash")
    looped = write_trained(tmp_path / "l", tmp_path / "target", "dloop", 2.0)
    (plain / "README.md").write_text("| 3 | 1.500 | 0.300 0.150 0.050 | 90 |\n")
    (looped / "README.md").write_text("| time | 3 minutes |\n\n| 3 | 1.600 | 0.400 0.150 0.050 | 80 |\n")
    assert ship.main([str(plain), "plain"]) == ship.main([str(looped), "looped"]) == 0
    assert sorted(path.name for path in ship.PACKAGE.iterdir()) == ["looped", "plain"]
    assert read_difference(ship.PACKAGE / "plain") is None
    assert list(load_file(ship.PACKAGE / "looped" / "model.safetensors")) == ["norm.weight"]
    card = (ship.PACKAGE / "looped" / "README.md").read_text().splitlines()
    assert "| looped | 3 | 1.600 | 0.400 0.150 0.050 | 80 |" in card
    assert "| plain | 3 | 1.500 | 0.300 0.150 0.050 | 90 |" in card
    assert "- `norm.weight`" in card
    size = sum((ship.PACKAGE / name / "model.safetensors").stat().st_size for name in NAMES)
    assert f"{size / 1e6:.1f} MB of 40 MB" in capsys.readouterr().out


def test_a_head_that_fetch_would_not_restore_is_refused(
    ship: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_trained(tmp_path / "p", tmp_path / "target", "dflash")
    assert ship.main([str(plain), "plain"]) == 0
    before = (ship.PACKAGE / "plain" / "model.safetensors").read_bytes()
    weights = load_file(plain / "model.safetensors")
    weights["lm_head.weight"][7] += 1
    save_file(weights, plain / "model.safetensors")
    assert ship.main([str(plain), "plain"]) == 2
    assert "lm_head.weight" in capsys.readouterr().err
    assert (ship.PACKAGE / "plain" / "model.safetensors").read_bytes() == before


def test_a_base_does_not_change_below_its_differences(
    ship: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_trained(tmp_path / "p", tmp_path / "target", "dflash")
    other = write_trained(tmp_path / "o", tmp_path / "target", "dflash", 3.0)
    looped = write_trained(tmp_path / "l", tmp_path / "target", "dloop", 2.0)
    assert [ship.main([str(plain), "plain"]), ship.main([str(looped), "looped"])] == [0, 0]
    assert ship.main([str(plain), "plain"]) == 0  # the same file
    assert ship.main([str(other), "plain"]) == 2
    assert "looped is a difference to the plain" in capsys.readouterr().err
    assert (ship.PACKAGE / "looped" / DIFFERENCE_FILE).is_file()


def test_the_limit_counts_what_was_ever_shipped(
    ship: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_trained(tmp_path / "p", tmp_path / "target", "dflash")
    second = write_trained(tmp_path / "o", tmp_path / "target", "dflash", 3.0)
    assert ship.main([str(first), "plain"]) == 0
    size = (ship.PACKAGE / "plain" / "model.safetensors").stat().st_size
    git(ship.PACKAGE, "add", ".")
    git(ship.PACKAGE, "commit", "-qm", "first")
    assert ship.size_ever_shipped(ship.PACKAGE) == size
    assert ship.main([str(second), "plain"]) == 0
    assert ship.size_ever_shipped(ship.PACKAGE) == 2 * size
    monkeypatch.setattr(ship, "LIMIT_BYTES", 2 * size - 1)
    assert ship.main([str(second), "plain"]) == 1


def test_an_unknown_name_is_answered_with_the_known_ones(ship: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ship.main(["somewhere", "nope"])
    assert "choose from 'plain', 'looped'" in capsys.readouterr().err


def test_a_rounded_difference_is_measured_again(ship: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "target"
    plain = write_trained(tmp_path / "p", target, "dflash")
    looped = write_trained(tmp_path / "l", target, "dloop", 2.0)
    weights = load_file(looped / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"] + 0.1 * torch.randn_like(weights["fc.weight"])
    save_file(weights, looped / "model.safetensors")
    (looped / "README.md").write_text("| 3 | 9.600 | 0.400 0.150 0.050 | 80 |\n")
    store = tmp_path / "store"
    rows = [torch.randint(3, 90, (20,)).tolist() for _ in range(20)]
    layers = json.loads((looped / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    build_store([Answer(row[:6], row[6:], "test") for row in rows], target, layers, store)
    assert ship.main([str(plain), "plain"]) == 0
    assert ship.main([str(looped), "looped", "--rounded", str(store)]) == 0
    assert read_difference(ship.PACKAGE / "looped").rounded == ("fc.weight",)
    card = (ship.PACKAGE / "looped" / "README.md").read_text()
    assert "9.600" not in card
    assert "1 of them as changes of 4 bits per weight" in card
    assert ship.main([str(plain), "plain", "--rounded", str(store)]) == 2
