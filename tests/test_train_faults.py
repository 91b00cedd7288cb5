"""What a training run survives: broken data, another target, a full disk, a kill. Nothing is lost and all is said."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dflash_plugins.errors import BadInput
from dflash_plugins.train.answers import Answer, build_store
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.state import STATE_FILE
from dflash_plugins.train.store import FeatureStore, StoreMeta, write_shard
from dflash_plugins.train.trainer import Trainer

RECIPE: dict[str, Any] = {
    "mask_token_id": tiny.MASK, "draft_vocab_size": 64, "steps": 40, "sequences_per_step": 2, "anchors_per_sequence": 4,
    "held_out_sequences": 2, "precision": "fp32",
}  # fmt: skip
SHARD = "shard-00000.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a feature store of 24 answers."""
    return tiny.write_store(tmp_path_factory.mktemp("train"))


@pytest.fixture
def data(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The same target and a copy of the store that a test may break."""
    return made[0], Path(shutil.copytree(made[1], tmp_path / "store"))


def rewrite(shard: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    with safe_open(shard, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        metadata = file.metadata()
    change(tensors)
    write_shard(shard, tensors, StoreMeta(metadata["target_fingerprint"], (0, 2)), ["test"] * 24)


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1000])


def garble(shard: Path) -> None:
    shard.write_bytes(b"\x01" + shard.read_bytes()[1:])


def drop_final(shard: Path) -> None:
    rewrite(shard, lambda tensors: tensors.__delitem__("final"))


def shift_starts(shard: Path) -> None:
    rewrite(shard, lambda tensors: tensors["starts"].__setitem__(-1, 7))


def cut_features(shard: Path) -> None:
    rewrite(shard, lambda tensors: tensors.update(features=tensors["features"][:-3].clone()))


@pytest.mark.parametrize("damage", [truncate, garble, drop_final, shift_starts, cut_features])
def test_a_broken_shard_is_named_before_anything_starts(
    data: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copy2(data[1] / SHARD, data[1] / "shard-00001.safetensors")
    damage(data[1] / "shard-00001.safetensors")
    with pytest.raises(BadInput, match=r"shard-00001\.safetensors: .*make them again") as caught:
        Trainer(Recipe(**RECIPE), *data, tmp_path / "run")
    assert SHARD not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_features_that_are_not_finite_end_the_run_before_a_step(data: tuple[Path, Path], tmp_path: Path) -> None:
    trainer = Trainer(Recipe(**RECIPE), *data, tmp_path / "run")
    trainer.save()
    before = load_file(tmp_path / "run" / STATE_FILE)
    rewrite(data[1] / SHARD, lambda tensors: tensors["features"].fill_(float("nan")))
    trainer = Trainer(Recipe(**RECIPE), *data, tmp_path / "run")
    with pytest.raises(BadInput, match=f"loss of step 1 is nan: features in {SHARD} are not finite"):
        trainer.run()
    assert all(bool(torch.isfinite(p).all()) for p in trainer.drafter.parameters())
    after = load_file(tmp_path / "run" / STATE_FILE)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_target_is_refused(data: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny.write_target(tmp_path / "other", seed=5)
    with pytest.raises(BadInput, match=r"are of sha256:.*features of another target"):
        Trainer(Recipe(**RECIPE), other, data[1], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_shards_of_another_target_are_not_gone_on_with(data: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny.write_target(tmp_path / "other", seed=5)
    answers = [Answer([5, 6], [7, 8, 9], "test")]
    with pytest.raises(BadInput, match=f"{SHARD} holds features of sha256"):
        build_store(answers, other, [0, 2], data[1])
    with pytest.raises(BadInput, match=r"layers \[0, 2\]"):
        build_store(answers, data[0], [0, 1], data[1])


def test_a_broken_state_is_named(data: tuple[Path, Path], tmp_path: Path) -> None:
    Trainer(Recipe(**RECIPE), *data, tmp_path / "run").save()
    truncate(tmp_path / "run" / STATE_FILE)
    with pytest.raises(BadInput, match="is no whole state of a run"):
        Trainer(Recipe(**RECIPE), *data, tmp_path / "run")


# Files of this process may grow no further than that: what a full disk does, without one.
FULL_DISK = """
import resource, sys
from pathlib import Path
from dflash_plugins.errors import BadInput
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.trainer import Trainer
target, store, out = map(Path, sys.argv[1:])
trainer = Trainer(Recipe(**{recipe!r}), target, store, out)
trainer.save()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
trainer._train_step()
trainer.step += 1
try:
    trainer.save()
except BadInput as error:
    print(error)
    sys.exit(7)
"""


def test_a_full_disk_leaves_what_was_saved_before(data: tuple[Path, Path], tmp_path: Path, python: Any) -> None:
    out = tmp_path / "run"
    done = python("-c", FULL_DISK.format(recipe=RECIPE), str(data[0]), str(data[1]), str(out))
    assert done.returncode == 7, done.stderr
    assert "cannot be written, and is left as it was" in done.stdout
    assert [path.name for path in out.iterdir()] == [STATE_FILE]
    assert Trainer(Recipe(**RECIPE), *data, out).step == 0


# Saves after every step, and says so.
LEG = """
import sys
from pathlib import Path
from dflash_plugins.train import trainer as module
from dflash_plugins.train.recipe import Recipe
module.SAVE_EVERY_SECONDS = 0.0
target, store, out = map(Path, sys.argv[1:])
module.Trainer(Recipe(**{recipe!r}), target, store, out).run(tell=lambda progress: print(progress.step, flush=True))
"""


def test_a_killed_run_ends_in_the_weights_of_an_unbroken_one(
    data: tuple[Path, Path], tmp_path: Path, repository: Path
) -> None:
    whole = Trainer(Recipe(**RECIPE), *data, tmp_path / "whole")
    assert whole.run()
    argv = [sys.executable, "-c", LEG.format(recipe=RECIPE), *map(str, data), str(tmp_path / "legs")]
    path = os.pathsep.join([str(repository), *filter(None, [os.environ.get("PYTHONPATH")])])
    seen = 0
    for _ in range(2):
        leg = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
        assert leg.stdout is not None
        for line in leg.stdout:
            if int(line) >= seen + 9:
                leg.send_signal(signal.SIGKILL)
                break
        seen = int(line)
        assert leg.wait() == -signal.SIGKILL
        leg.stdout.close()
        time.sleep(0.1)
    last = Trainer(Recipe(**RECIPE), *data, tmp_path / "legs")
    assert seen - 1 <= last.step < RECIPE["steps"]
    assert last.run()
    for (name, a), b in zip(whole.drafter.named_parameters(), last.drafter.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_store_of_whole_shards_is_read(data: tuple[Path, Path]) -> None:
    assert len(FeatureStore(data[1]).sequences) == 24
