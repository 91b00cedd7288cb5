"""Changes of a tensor in four bits per weight, for drafters that are shipped beside a base.

Along its last dimension a change is cut into groups of ``GROUP`` weights; each has a scale, and every weight of it one
of sixteen steps. The drafter IS what comes of the base and its rounded changes: what is served has been rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64
LARGEST_STEP = 7
CODES_SUFFIX = ".codes"
SCALES_SUFFIX = ".scales"


def can_round(value: Tensor, before: Tensor) -> bool:
    """Whether the change from ``before`` to ``value`` can be cut into groups."""
    fits = value.dim() == 2 and value.shape == before.shape and value.shape[1] % GROUP == 0
    return fits and value.is_floating_point() and value.dtype == before.dtype


def round_change(value: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Of [rows, columns]: codes uint8 [rows, columns / 2], two in each, and scales fp16 [rows, columns / GROUP]."""
    change = (value.float() - before.float()).unflatten(1, (-1, GROUP))
    scales = (change.abs().amax(-1) / LARGEST_STEP).half()
    steps = (change / scales.float().clamp_min(1e-12)[..., None]).round().clamp(-LARGEST_STEP - 1, LARGEST_STEP)
    codes = (steps.flatten(1) + LARGEST_STEP + 1).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def with_change(before: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """``before`` [rows, columns] and its rounded change, in the dtype of ``before``."""
    steps = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).float() - (LARGEST_STEP + 1)
    change: Tensor = steps.unflatten(1, (-1, GROUP)) * scales.float()[..., None]
    return (before.float() + change.flatten(1)).to(before.dtype)
