"""The state of a training run in safetensors: weights, both moments of the optimizer, and the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash_plugins.errors import BadInput
from dflash_plugins.train.sharding import divided_like, whole
from dflash_plugins.whole_file import whole_file

STATE_FILE = "training-state.safetensors"


def state_tensors(drafter: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments, each as one piece; of a divided drafter every process has to ask."""
    tensors = {}
    for name, parameter in trained_parameters(drafter).items():
        tensors[f"weight.{name}"] = whole(parameter.detach()).contiguous()
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                tensors[f"{moment}.{name}"] = whole(optimizer.state[parameter][moment]).contiguous()
    return tensors


def save_state(folder: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """Writes the state beside its place and renames it. ``facts`` must hold ``step`` and whatever must agree later."""
    with whole_file(folder / STATE_FILE) as partial:
        save_file(tensors, partial, metadata={"facts": json.dumps(facts, sort_keys=True)})


def load_state(
    folder: Path,
    drafter: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    expected: dict[str, Any],
    defaults: dict[str, Any],
) -> dict[str, Any]:
    """Restores the newest state and returns its facts; none when there is no state. BadInput for another run's.

    A state older than a setting was trained with the value of that setting in ``defaults``.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return {}
    try:
        file = safe_open(path, framework="pt")
        facts = json.loads(file.metadata()["facts"])
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise BadInput(f"{path}: is no whole state of a run ({error}); remove it to begin anew") from error
    known = {**json.loads(json.dumps(defaults)), **facts}
    wrong = {key: (known.get(key), value) for key, value in expected.items() if known.get(key) != value}
    if wrong:
        raise BadInput(f"{path}: of another run; (found, wanted): {wrong}. Choose another --out or remove it")
    step = int(facts["step"])
    for name, parameter in trained_parameters(drafter).items():
        parameter.data.copy_(divided_like(file.get_tensor(f"weight.{name}"), parameter))
        if step == 0:
            continue  # saved before the first step: the optimizer had nothing to keep
        moments = {
            moment: divided_like(file.get_tensor(f"{moment}.{name}"), parameter) for moment in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return dict(facts)


def trained_parameters(drafter: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in drafter.named_parameters() if p.requires_grad}
