"""A drafter's first weights from the target it is trained for: far better than random ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput

_LAYER_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


class TargetTensors:
    """Single tensors of a transformers checkpoint in one or several safetensors files."""

    def __init__(self, target: Path) -> None:
        self._files = [safe_open(path, framework="pt") for path in sorted(target.glob("*.safetensors"))]
        self._home = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - no mapping
        if not self._home:
            raise BadInput(f"{target}: no safetensors file with the target's weights in it")

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def get(self, name: str) -> Tensor:
        """The tensor ``name`` in fp32; BadInput when the target has none."""
        if name not in self._home:
            raise BadInput(f"the target has no tensor {name}")
        tensor: Tensor = self._home[name].get_tensor(name).float()
        return tensor

    def embedding(self) -> Tensor:
        """fp32 [V, H]."""
        return self.get("model.embed_tokens.weight")

    def head(self) -> Tensor:
        """fp32 [V, H]; the embedding when the two are tied."""
        return self.get("lm_head.weight" if "lm_head.weight" in self else "model.embed_tokens.weight")


def initialise_from_target(drafter: Drafter, tensors: TargetTensors, num_target_layers: int) -> list[str]:
    """Copies the target's last layers, its final norm and its features' identity; returns what was written.

    Drafter layer i of n starts as target layer L - n + i where there is one and shapes agree. ``fc`` passes the deepest
    tapped layer on.
    """
    config = drafter.config
    written = []
    first = num_target_layers - config.num_layers
    state = dict(drafter.named_parameters())
    with torch.no_grad():
        for layer in range(max(0, -first), config.num_layers):
            for part in _LAYER_PARTS:
                source = f"model.layers.{first + layer}.{part}.weight"
                written += _copy(state, f"layers.{layer}.{part}.weight", tensors.get(source))
        written += _copy(state, "norm.weight", tensors.get("model.norm.weight"))
        written += _copy(
            state, "hidden_norm.weight", tensors.get(f"model.layers.{num_target_layers - 1}.input_layernorm.weight")
        )
        _identity_on_deepest_tap(drafter)
    return written


def _copy(state: dict[str, torch.nn.Parameter], name: str, value: Tensor) -> list[str]:
    if state[name].shape != value.shape:
        return []
    state[name].copy_(value)
    return [name]


def _identity_on_deepest_tap(drafter: Drafter) -> None:
    config = drafter.config
    if config.hidden_size != config.target_hidden_size:
        return
    deepest = max(range(len(config.target_layer_ids)), key=config.target_layer_ids.__getitem__)
    width = config.target_hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, deepest * width : (deepest + 1) * width].add_(torch.eye(width))
