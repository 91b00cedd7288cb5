"""What a drafter and an engine have to know of the target, from its config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_plugins.config_models import TargetConfig
from dflash_plugins.config_places import config_file, read_json
from dflash_plugins.config_reader import NUMBER, is_int
from dflash_plugins.errors import Refused
from dflash_plugins.findings import Finding

# Keys of layers that keep a state which no length can crop.
_STATEFUL = ("linear_num_", "linear_conv_", "mamba_", "ssm_", "rglru_")
_WITH_KV = ("full_attention", "sliding_attention", "chunked_attention", "attention", "global_attention")


_KV_SIZES = (
    "kv_lora_rank", "qk_rope_head_dim", "num_key_value_heads", "num_attention_heads", "head_dim", "hidden_size",
)  # fmt: skip


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids given as one integer, a list of them or null."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if is_int(v))


def read_target_config(path: Path | str) -> TargetConfig:
    """The target's description; ``Refused`` with every reason when config.json does not give one."""
    file = config_file(Path(path), "target")
    raw = read_json(file)
    try:
        return TargetConfig(**_facts(raw, read_generation_config(file.parent)))
    except ValidationError as error:
        raise Refused(f"target {file}", _findings(error)) from error


def read_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json of a target, empty where there is none."""
    file = directory / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _facts(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    eos = (*token_ids(text.get("eos_token_id", raw.get("eos_token_id"))), *token_ids(generation.get("eos_token_id")))
    names = raw.get("architectures")
    return {
        "architecture": names[0] if isinstance(names, list) and names else None,
        "num_layers": text.get("num_hidden_layers"),
        "hidden_size": text.get("hidden_size"),
        "vocab_size": text.get("vocab_size"),
        "rope_theta": _theta(text),
        "eos_token_ids": tuple(dict.fromkeys(eos)),
        "pad_token_id": _integer(text.get("pad_token_id")),
        "dtype": text.get("dtype", text.get("torch_dtype", raw.get("dtype", raw.get("torch_dtype")))),
        "max_position_embeddings": text.get("max_position_embeddings"),
        "num_kv_layers": _kv_layers(text),
        "kv_width": _kv_width(text),
        "num_kv_heads": _integer(text.get("num_key_value_heads")),
        "stateful": _kv_layers(text) != text.get("num_hidden_layers") or any(k.startswith(_STATEFUL) for k in text),
        "multimodal": any(isinstance(raw.get(k), dict) for k in ("vision_config", "audio_config")),
    }


def _integer(value: Any) -> int | None:
    return int(value) if is_int(value) else None


def _theta(text: Mapping[str, Any]) -> float | None:
    rope = text.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    full = rope.get("full_attention", rope)
    theta = (full if isinstance(full, dict) else {}).get("rope_theta", text.get("rope_theta"))
    return theta if NUMBER.accepts(theta) else None


def _kv_layers(text: Mapping[str, Any]) -> int | None:
    """Layers with a KV cache: by their types, else by the interval of full attention, else all."""
    layers, interval = _integer(text.get("num_hidden_layers")), _integer(text.get("full_attention_interval"))
    for key in ("layer_types", "layers_block_type"):
        if isinstance(types := text.get(key), list) and len(types) == layers:
            return sum(kind in _WITH_KV for kind in types)
    return layers // interval if layers and interval and interval > 0 else layers


def _kv_width(text: Mapping[str, Any]) -> int | None:
    """Elements of K and V together, per token and layer; None where config.json leaves it open."""
    size = {key: _integer(text.get(key)) or 0 for key in _KV_SIZES}
    if size["kv_lora_rank"] > 0:
        return size["kv_lora_rank"] + size["qk_rope_head_dim"]
    heads = size["num_attention_heads"]
    head = size["head_dim"] or (size["hidden_size"] // heads if heads > 0 else 0)
    return max(2 * (size["num_key_value_heads"] or heads) * head, 0) or None


def _findings(error: ValidationError) -> Iterator[Finding]:
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        mend = "use a complete transformers config.json"
        yield Finding.error("target-config", key, problem["input"], problem["msg"], mend)
