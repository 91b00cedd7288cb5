"""Writing a description as a config.json: the released nested layout, and speculators' flat one."""

from __future__ import annotations

from typing import Any

from dflash_plugins.config_models import DraftConfig
from dflash_plugins.errors import BadInput


def _written_scaling(config: DraftConfig) -> dict[str, Any]:
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    return {"rope_theta": config.rope_theta, **scaling}


def _written_attention(config: DraftConfig) -> dict[str, Any]:
    sliding = [w is not None for w in config.windows]
    windows = {w for w in config.windows if w is not None}
    if len(windows) > 1:
        raise BadInput(f"windows {config.windows}: no published layout can say more than one window size")
    keys: dict[str, Any] = {
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
    }
    if len(set(config.causal)) == 1:
        keys["is_causal"] = config.causal[0]
    elif list(config.causal) != sliding:
        raise BadInput(f"causal {config.causal}: no published layout can say this beside layer types")
    return keys


def _written_layers(config: DraftConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _written_scaling(config),
        "attention_bias": config.attention_bias,
        "hidden_act": config.hidden_act,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        **_written_attention(config),
    }


def _written_draft(config: DraftConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    if config.conv:
        keys |= {"conv_kernel_size": config.conv.kernel_size, "conv_group_size": config.conv.group_size}
    if config.selector:
        keys |= {"selector_top_k": config.selector.top_k, "selector_rank": config.selector.rank}
    for name, neutral in (
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", None),
    ):
        if getattr(config, name) != neutral:
            keys[name] = getattr(config, name)
    if config.loop and config.loop.mode == "refine":
        keys["dloop"] = {"mode": "refine", "prefix_lengths": list(config.loop.prefix_lengths)}
    elif config.loop:
        keys["dloop"] = {"mode": "extend", "max_loops": config.loop.max_loops, "gate": config.loop.gate}
    return keys


def _written_pair(config: DraftConfig) -> dict[str, Any]:
    names = ("draft_vocab_size", "target_hidden_size", "num_target_layers", "dtype")
    return {name: getattr(config, name) for name in names if getattr(config, name) is not None}


def to_nested(config: DraftConfig) -> dict[str, Any]:
    """The config.json of the released layout (``dflash_config``), which both engines load."""
    draft = {**_written_draft(config), "target_layer_ids": list(config.target_layer_ids)}
    return {
        "architectures": [config.architecture],
        **_written_layers(config),
        **_written_pair(config),
        "dflash_config": draft,
    }


def to_flat(config: DraftConfig) -> dict[str, Any]:
    """speculators' flat layout of the same drafter; its layer ids are one higher."""
    return {
        "architectures": [config.architecture],
        "speculators_model_type": config.method,
        **_written_pair(config),
        **_written_draft(config),
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "sliding_window_non_causal": not any(config.causal),
        "transformer_layer_config": _written_layers(config),
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.k}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
