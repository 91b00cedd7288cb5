"""What a run starts from and what it may change: another drafter's tensors, and the parameters that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from dflash_plugins.config import DraftConfig
from dflash_plugins.drafter import Drafter, load_drafter
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import Finding

# What a method adds, and what does not change a tensor's meaning.
_FREE = {"method", "architecture", "selector", "conv", "loop", "dtype", "num_target_layers", "max_position_embeddings"}


def load_start(folder: str | None) -> Drafter | None:
    """The drafter in ``folder`` in fp32, or None; BadInput or Refused as in ``load_drafter``."""
    return None if folder is None else load_drafter(Path(folder), dtype=torch.float32)


def require_same_geometry(config: DraftConfig, start: DraftConfig) -> None:
    """Refused with every field in which tensors of the two descriptions would mean different things."""
    wanted, found = config.model_dump(mode="json"), start.model_dump(mode="json")
    differing = [key for key in wanted if key not in _FREE and wanted[key] != found[key]]
    if differing:
        raise Refused("start_from", [_differs(key, found[key], wanted[key]) for key in differing])


def _differs(key: str, found: object, wanted: object) -> Finding:
    message, mend = (
        f"this run trains a drafter with {wanted}",
        "start from a drafter of the same geometry, or set the run's to it",
    )
    return Finding.error("start-geometry", key, found, message, mend)


@torch.no_grad()
def take_tensors(drafter: Drafter, start: Drafter) -> list[str]:
    """Copies every tensor of ``start`` that has the same name and shape into ``drafter``; their names, sorted."""
    mine, theirs = drafter.state_dict(), start.state_dict()
    taken = [name for name in sorted(mine) if name in theirs and mine[name].shape == theirs[name].shape]
    for name in taken:
        mine[name].copy_(theirs[name])
    return taken


def freeze_others(drafter: Drafter, patterns: Sequence[str]) -> None:
    """Leaves only parameters that match one of ``patterns`` to be trained; all of them when there is no pattern.

    What was frozen before stays frozen. BadInput names every pattern that matches nothing that could be trained.
    """
    if not patterns:
        return
    trainable = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in trainable)]
    if idle:
        raise BadInput(f"train_only {', '.join(idle)}: matches no parameter; there are {', '.join(sorted(trainable))}")
    for name, parameter in trainable.items():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
