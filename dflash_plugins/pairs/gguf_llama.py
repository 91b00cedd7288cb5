"""A Llama checkpoint in GGUF form, dequantised into the Hugging Face layout.

Only what the embedded target needs is handled: the ``llama`` architecture with tied embeddings and a
byte-level BPE tokenizer. Everything is read from the file; nothing is assumed about the model in it.

Two traps are mended here because transformers' own GGUF reader has them: q/k rows are stored interleaved for
llama.cpp's rotary layout and must be de-interleaved, and the pre-tokenizer of the SmolLM family splits digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN_TYPE = 3


def convert(gguf_path: Path, out_dir: Path, *, tick: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Writes configuration, ``model.safetensors`` (bf16) and tokenizer in the Hugging Face layout into ``out_dir``.

    ``tick(done, total)`` is called once per tensor. Raises ``ValueError`` when the file is not a Llama GGUF.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    fields = _fields(reader)
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{gguf_path.name}: architecture {fields['general.architecture']!r} is not 'llama'")
    tensors = {}
    total = len(reader.tensors)
    for done, (name, tensor) in enumerate(_tensors(reader, fields), 1):
        tensors[name] = tensor
        tick(done, total)
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", _config(fields, tied="lm_head.weight" not in tensors))
    eos = fields["tokenizer.ggml.eos_token_id"]
    _write_json(out_dir / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})
    _write_json(out_dir / "tokenizer.json", _tokenizer(fields))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(fields))


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")


def _fields(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _tensors(reader: GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = deinterleave_rope_rows(values, heads[kind])
        yield _hf_name(tensor.name), torch.from_numpy(values.copy()).to(torch.bfloat16)


def deinterleave_rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of ``weight`` [heads * head_dim, in] from llama.cpp's order (rotary pairs adjacent) to halves."""
    rows, width = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, layer, kind, suffix = name.split(".")
    if block != "blk" or kind not in _TENSOR_NAMES:
        raise ValueError(f"unknown GGUF tensor {name!r}")
    return f"model.layers.{layer}.{_TENSOR_NAMES[kind]}.{suffix}"


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", fields["tokenizer.ggml.eos_token_id"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _control_tokens(fields: dict[str, Any]) -> list[tuple[int, str]]:
    types = fields["tokenizer.ggml.token_type"]
    return [(i, t) for i, t in enumerate(fields["tokenizer.ggml.tokens"]) if types[i] == _CONTROL_TOKEN_TYPE]


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in _control_tokens(fields)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    name = {key: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos")}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": name["bos"],
        "eos_token": name["eos"],
        "pad_token": name["eos"],
        "additional_special_tokens": [token for _, token in _control_tokens(fields)][:3],
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
