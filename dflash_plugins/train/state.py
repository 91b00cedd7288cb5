"""The state of a training run in safetensors: weights, both moments of the optimizer, and the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash_plugins.errors import BadInput
from dflash_plugins.train.store import whole_file

STATE_FILE = "training-state.safetensors"


def save_state(folder: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Writes the state beside its place and renames it. ``facts`` must hold ``step`` and whatever must agree later."""
    tensors = {}
    for name, parameter in trained_parameters(drafter).items():
        tensors[f"weight.{name}"] = parameter.detach().contiguous()
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].contiguous()
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
        parameter.data.copy_(file.get_tensor(f"weight.{name}"))
        if step == 0:
            continue  # saved before the first step: the optimizer had nothing to keep
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": file.get_tensor(f"exp_avg.{name}").to(parameter.device),
            "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}").to(parameter.device),
        }
    return dict(facts)


def trained_parameters(drafter: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in drafter.named_parameters() if p.requires_grad}
