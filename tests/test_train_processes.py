"""Training in two processes (gloo), and in turns: the same blocks, the same losses, the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from dflash_plugins.errors import BadInput
from dflash_plugins.train.answers import Answer, build_store
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.state import STATE_FILE
from dflash_plugins.train.trainer import Trainer

RECIPE: dict[str, Any] = {
    "mask_token_id": tiny.MASK, "draft_vocab_size": 64, "steps": 12, "sequences_per_step": 4, "anchors_per_sequence": 6,
    "held_out_sequences": 2, "conv_group_size": 16, "selector_top_k": 4, "selector_rank": 8, "precision": "fp32",
    "learning_rate": 3e-3,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "dflash2": {"method": "dflash2"},
    "dloop-selector": {"method": "dloop", "prefix_lengths": [1, 3], "dloop_selector": True},
}
SCRIPT = """
import json, sys
from pathlib import Path
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.trainer import Trainer
target, store, out, recipe, divided = sys.argv[1:]
losses = []
trainer = Trainer(Recipe.of(json.loads(recipe)), Path(target), Path(store), Path(out), divided=divided == "divided")
trainer.run(tell=lambda progress: losses.append(progress.loss), held_out_every=5)
Path(f"{out}/losses-{trainer.accelerator.process_index}.json").write_text(json.dumps(losses))
trainer.leave()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and answers of mixed lengths, so that shares of a step differ in what they weigh."""
    folder = tmp_path_factory.mktemp("train")
    target = tiny.write_target(folder / "target")
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 90, (9 + i % 18,), generator=generator).tolist() for i in range(40)]
    build_store([Answer(row[:6], row[6:], "test") for row in rows], target, [0, 2], folder / "store")
    return target, folder / "store"


def alone(data: tuple[Path, Path], out: Path, recipe: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses: list[float] = []
    trainer = Trainer(Recipe.of(recipe), *data, out)
    trainer.run(tell=lambda progress: losses.append(progress.loss))
    return losses, load_file(out / STATE_FILE)


def in_two(repository: Path, *arguments: str) -> str:
    """What two processes of a script or module print on stdout."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    path = os.pathsep.join([str(repository), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=os.environ | settings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-9000:]
    return done.stdout


@pytest.mark.parametrize(
    ("method", "how"),
    [*((method, "copied") for method in METHODS), ("dflash", "divided"), ("dloop-selector", "divided")],
)
def test_two_processes_give_the_curve_and_the_weights_of_one(
    data: tuple[Path, Path], tmp_path: Path, repository: Path, method: str, how: str
) -> None:
    recipe = RECIPE | METHODS[method]
    losses, weights = alone(data, tmp_path / "one", recipe)
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "two"
    in_two(repository, str(tmp_path / "script.py"), *map(str, data), str(out), json.dumps(recipe), how)
    curves = [json.loads((out / f"losses-{rank}.json").read_text()) for rank in (0, 1)]
    assert curves[0] == curves[1] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    found = load_file(out / STATE_FILE)
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4, msg=name)


def test_the_command_in_two_processes_answers_once(data: tuple[Path, Path], tmp_path: Path, repository: Path) -> None:
    settings = [f"--set={key}={json.dumps(value)}" for key, value in RECIPE.items() if key != "steps"]
    arguments = ["train", "--target", str(data[0]), "--data", str(data[1]), "--out", str(tmp_path / "run"), "--json"]
    printed = in_two(repository, "-m", "dflash_plugins.cli", *arguments, "--steps", "3", *settings)
    document = json.loads(printed)
    assert (document["finished"], document["step"]) == (True, 3)
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()


def test_a_divided_run_stops_goes_on_and_exports_as_one_process_does(
    data: tuple[Path, Path], tmp_path: Path, repository: Path
) -> None:
    settings = [f"--set={key}={json.dumps(value)}" for key, value in RECIPE.items() if key != "steps"]
    arguments = [
        "train",
        "--target",
        str(data[0]),
        "--data",
        str(data[1]),
        "--json",
        "--held-out-every",
        "2",
        *settings,
    ]
    divided = ["-m", "dflash_plugins.cli", *arguments, "--divide", "--out", str(tmp_path / "two")]
    in_two(repository, *divided, "--steps", "12", "--minutes", "0")
    document = json.loads(in_two(repository, *divided, "--steps", "12"))
    assert (document["finished"], document["step"]) == (True, 12)
    _, weights = alone(data, tmp_path / "one", RECIPE)
    exported = load_file(tmp_path / "two" / "drafter" / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("weight."):
            torch.testing.assert_close(
                exported[name.removeprefix("weight.")].float(), tensor, rtol=2e-3, atol=2e-4, msg=name
            )


def test_the_command_for_a_large_target_in_small(data: tuple[Path, Path], tmp_path: Path, repository: Path) -> None:
    """docs/training.md: features of the target while training runs, a divided drafter, block 16 and five layers."""
    generator = torch.Generator().manual_seed(5)
    with (tmp_path / "answers.jsonl").open("w") as file:
        for length in range(20, 50):
            ids = torch.randint(3, 90, (length,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n")
    settings = {
        "features": "live", "target_layer_ids": [0, 2], "mask_token_id": tiny.MASK, "block_size": 16, "num_layers": 5,
        "gamma": 7, "anchors_per_sequence": 512, "sequences_per_step": 4, "short_k": None, "draft_vocab_size": None,
        "learning_rate": 6e-4, "held_out_sequences": 2,
    }  # fmt: skip
    chosen = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    arguments = ["train", "--divide", "--method", "dflash", "--target", str(data[0]), "--out", str(tmp_path / "run")]
    answers = ["--data", str(tmp_path / "answers.jsonl"), "--steps", "2", "--json"]
    document = json.loads(in_two(repository, "-m", "dflash_plugins.cli", *arguments, *answers, *chosen))
    assert (document["finished"], document["step"], document["blocks"]) == (True, 2, 4096)
    config = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert (config["dflash_config"]["block_size"], config["num_hidden_layers"]) == (16, 5)


def test_a_run_of_one_process_has_nobody_to_be_divided_between(data: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--divide: there is one process"):
        Trainer(Recipe.of(RECIPE), *data, tmp_path, divided=True)


def test_turns_that_weigh_the_same_give_the_step_they_are_parts_of(data: tuple[Path, Path], tmp_path: Path) -> None:
    """The mean over turns is that over all blocks where no label is unknown, as in short blocks of long answers."""
    recipe = RECIPE | {"short_k": 1, "short_share": 1.0, "draft_vocab_size": None}
    losses, _ = alone(data, tmp_path / "one", recipe)
    in_turns, _ = alone(data, tmp_path / "turns", recipe | {"accumulate": 2})
    assert in_turns == pytest.approx(losses, rel=1e-4)


def test_divided_turns_give_the_step_they_are_parts_of(
    data: tuple[Path, Path], tmp_path: Path, repository: Path
) -> None:
    recipe = RECIPE | {"short_k": 1, "short_share": 1.0, "draft_vocab_size": None}
    losses, _ = alone(data, tmp_path / "one", recipe)
    (tmp_path / "script.py").write_text(SCRIPT)
    turns = json.dumps(recipe | {"accumulate": 2})
    in_two(repository, str(tmp_path / "script.py"), *map(str, data), str(tmp_path / "two"), turns, "divided")
    assert json.loads((tmp_path / "two" / "losses-0.json").read_text()) == pytest.approx(losses, rel=1e-4)


def test_a_step_that_cannot_be_shared_is_refused(data: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"sequences_per_step 4 .* in 3 turns"):
        Trainer(Recipe.of(RECIPE | {"accumulate": 3}), *data, tmp_path)
