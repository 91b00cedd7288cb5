"""Where published drafters keep their keys: one table of places, read without interpreting the values.

A key may stand at several places (top level, ``dflash_config``, ``transformer_layer_config``). Every place is looked
at, so that two places that disagree can both be named and a key that nothing reads is reported with its full path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.errors import BadInput

SECTIONS = ("dflash_config", "eagle_config", "transformer_layer_config")

# Keys of one decoder layer and of the whole stack; speculators nests them under transformer_layer_config.
LAYER_KEYS = (
    "add_swa_attention_sink_bias", "attention_bias", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "is_causal", "is_neox_style", "layer_types", "logit_scale", "max_position_embeddings",
    "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "partial_rotary_factor", "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "use_qk_norm", "use_sliding_window", "v_head_dim", "vocab_size",
)  # fmt: skip

# Keys of block drafting; nested in dflash_config since 2026, top level before and in speculators' flat layout.
DRAFT_KEYS = (
    "attention_sink_bias", "attention_value_scale", "block_size", "conv_group_size", "conv_kernel_size", "dloop",
    "draft_vocab_size", "final_logit_softcapping", "input_embedding_scale", "mask_token_id", "num_target_layers",
    "output_multiplier", "projector_type", "sample_from_anchor", "selector_rank", "selector_top_k",
    "target_hidden_size", "target_layer_ids", "use_aux_hidden_state", "use_swa", "swa_window_size",
)  # fmt: skip

# Written by transformers and speculators on their own, or facts about training: they change nothing that we compute.
IGNORED_KEYS = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "anchor_len",
        "architectures", "attention_dropout", "auto_map", "backbone_rotary_base", "bos_token_id",
        "chunk_size_feed_forward", "config_class", "cross_attention_hidden_size", "finetuning_task",
        "gradient_checkpointing", "has_embed_tokens", "has_lm_head", "has_own_lm_head", "id2label",
        "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "loss_decay_gamma", "max_anchors",
        "max_window_layers", "model_type", "num_anchors", "num_lookahead_tokens", "output_attentions",
        "output_hidden_states", "pretraining_tp", "problem_type", "pruned_heads", "return_dict", "speculators_config",
        "speculators_model_type", "speculators_version", "tf_legacy_loss", "tie_encoder_decoder",
        "tie_word_embeddings", "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One value found at one place; ``path`` is what the user sees, for example ``dflash_config.block_size``."""

    path: str
    value: Any


def _shifted(ids: Any) -> Any:
    """speculators numbers a layer by its input, so 1 means the output of layer 0."""
    if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
        return [i - 1 for i in ids]
    return ids


Place = tuple[str, Callable[[Any], Any]]


def _same(value: Any) -> Any:
    return value


def _places() -> dict[str, tuple[Place, ...]]:
    table: dict[str, tuple[Place, ...]] = {}
    for key in LAYER_KEYS:
        table[key] = ((key, _same), (f"transformer_layer_config.{key}", _same))
    for key in DRAFT_KEYS:
        table[key] = ((f"dflash_config.{key}", _same), (key, _same), (f"eagle_config.{key}", _same))
    table["causal"] = (("dflash_config.causal", _same),)
    table["sliding_window_non_causal"] = (("sliding_window_non_causal", _same),)
    table["dtype"] += (("torch_dtype", _same), ("transformer_layer_config.torch_dtype", _same))
    for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        table["target_layer_ids"] += ((key, _shifted),)
    return table


PLACES: Mapping[str, tuple[Place, ...]] = _places()
_KNOWN_PATHS = frozenset(path for places in PLACES.values() for path, _ in places)


def _at(raw: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    section, _, key = path.rpartition(".")
    holder = raw.get(section) if section else raw
    if not isinstance(holder, Mapping) or key not in holder:
        return False, None
    return True, holder[key]


def collect(raw: Mapping[str, Any]) -> dict[str, tuple[Entry, ...]]:
    """Every value of every known key, in order of precedence, places named. Explicit nulls are kept."""
    found: dict[str, tuple[Entry, ...]] = {}
    for key, places in PLACES.items():
        entries = []
        for path, convert in places:
            present, value = _at(raw, path)
            if present:
                entries.append(Entry(path, convert(value)))
        if entries:
            found[key] = tuple(entries)
    return found


def leaves(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Full path and value of every key, those of a section instead of the section."""
    for key, value in raw.items():
        if key in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def unknown_paths(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Full path and value of every key that no reader of ours looks at."""
    for key, value in raw.items():
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _unknown_in(value, f"{key}.")
        elif key not in SECTIONS and key not in IGNORED_KEYS and key not in _KNOWN_PATHS:
            yield key, value


def _unknown_in(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if key not in IGNORED_KEYS and prefix + key not in _KNOWN_PATHS:
            yield prefix + key, value


def config_file(path: Path, what: str) -> Path:
    """The config.json that ``path`` (a directory or the file itself) means; ``BadInput`` naming the path otherwise."""
    if path.is_file():
        return path
    if not path.exists():
        raise BadInput(f"{what}: {path} does not exist; give a directory that holds config.json")
    if not (path / "config.json").is_file():
        raise BadInput(f"{what}: {path} holds no config.json")
    return path / "config.json"


def json_object(line: str) -> dict[str, Any]:
    """The JSON object in one line of a file; ``BadInput`` when it is none, for whoever knows where the line stands."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadInput(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadInput(f"an object is needed, not {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ``BadInput`` naming the file and the line when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise BadInput(f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value
