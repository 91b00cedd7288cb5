"""A drafter divided between the processes of a run (FSDP2): each keeps a part of the weights, gradients and moments.

The whole step is one group: weights are gathered when its forward begins and let go after its backward, which is all
that a drafter of a few layers needs; what it saves is the fp32 optimizer state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, device: torch.device) -> None:
    """Divides the parameters of ``module`` between all processes; those that are frozen, too."""
    fully_shard(module, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within, the parameters of a divided ``module`` are whole in every process; others are so anyway."""
    if isinstance(module, FSDPModule):
        module.unshard()
    yield
    if isinstance(module, FSDPModule):
        module.reshard()


def average_now(module: nn.Module, *, now: bool) -> None:
    """Whether the next backward of a divided ``module`` ends in averaged gradients."""
    cast(FSDPModule, module).set_requires_gradient_sync(now)


def whole(tensor: Tensor) -> Tensor:
    """``tensor`` as one piece. Of a divided one every process has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(value: Tensor, parameter: Tensor) -> Tensor:
    """``value``, whole in every process, where ``parameter`` is and divided as it is."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
