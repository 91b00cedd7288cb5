"""Tiny random pairs: drafters in the released layout and transformers targets, small enough for any test.

Everything is written by hand (plain dicts, plain tensor names), so a test of a reader never meets its own writer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 32, 512
TARGET_LAYERS, TAPS, LAYERS, BLOCK, MASK = 4, (0, 2), 2, 8, 511


def raw_config(method: str = "dflash", *, draft: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """config.json of a tiny drafter; ``draft`` overrides keys of dflash_config, ``top`` the other ones."""
    architectures = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dloop": "DLoopDraftModel"}
    nested: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    if method == "dflash2":
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 4, "selector_rank": 8}
    if method == "dloop":
        nested |= {"dloop": {"mode": "refine", "prefix_lengths": [2]}}
    sliding = method == "dflash2"
    config: dict[str, Any] = {
        "architectures": [architectures[method]],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "num_target_layers": TARGET_LAYERS,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * LAYERS,
        "sliding_window": 16 if sliding else None,
        "use_sliding_window": sliding,
        "dflash_config": nested | (draft or {}),
    } | top
    if sliding:
        config.setdefault("is_causal", False)
    return config


def tensors(raw: dict[str, Any], *, seed: int = 0, std: float = 0.3) -> dict[str, Tensor]:
    """Random fp32 weights under the released names; norms are near 1 so that a skipped one shows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = _layer_shapes(raw) | _shared_shapes(raw)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        out[name] = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * std / shape[-1] ** 0.25
    cut = raw.get("draft_vocab_size")
    if cut:
        kept = torch.randperm(raw["vocab_size"], generator=generator)[:cut].sort().values
        out["d2t"] = kept - torch.arange(cut)
    return out


def _shared_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, nested = raw["hidden_size"], raw["dflash_config"]
    taps = len(nested["target_layer_ids"]) * raw.get("target_hidden_size", hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    if "selector_rank" in nested:
        rank, vocab = nested["selector_rank"], raw["vocab_size"]
        shapes |= {
            "candidate_selector.predecessor_codebook": (vocab, rank),
            "candidate_selector.successor_codebook": (vocab, rank),
            "candidate_selector.hidden_projection.weight": (rank, hidden),
        }
    if raw.get("draft_vocab_size"):
        shapes["lm_head.weight"] = (raw["draft_vocab_size"], hidden)
    return shapes


def _layer_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, nested = raw["hidden_size"], raw["intermediate_size"], raw["dflash_config"]
    head, queries = raw["head_dim"], raw["num_attention_heads"] * raw["head_dim"]
    keys = raw["num_key_value_heads"] * head
    one: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden), "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    if raw["attention_bias"]:
        one |= {f"self_attn.{p}_proj.bias": (n,) for p, n in {"q": queries, "k": keys, "v": keys, "o": hidden}.items()}
    if "conv_kernel_size" in nested:
        kernel, groups = nested["conv_kernel_size"], hidden // nested["conv_group_size"]
        for side in ("attention_conv", "mlp_conv"):
            one[f"{side}.base_kernel"] = (2, kernel, hidden)
            one[f"{side}.kernel_projection.weight"] = (2 * kernel * groups, hidden)
    return {f"layers.{i}.{name}": shape for i in range(raw["num_hidden_layers"]) for name, shape in one.items()}


def write_drafter(path: Path, raw: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    """A drafter directory: config.json and model.safetensors. Returns ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw, indent=1))
    save_file(tensors(raw) if weights is None else weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def shared(raw: dict[str, Any], *, seed: int = 7) -> tuple[Tensor, Tensor]:
    """A random embedding and head [V, H] as a target would lend them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (raw["vocab_size"], raw["hidden_size"])
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.5


def target(kind: str = "qwen3", *, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 transformers causal LM, ``qwen3`` or ``llama``: 4 layers, hidden 64, head_dim 32, 512 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": TARGET_LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "initializer_range": 0.2, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**(sizes | changes))).eval()
    raise ValueError(f"no tiny target of kind {kind!r}")


def write_target(path: Path, kind: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A target directory as transformers writes it. Returns ``path``."""
    target(kind, seed=seed, **changes).save_pretrained(path, safe_serialization=True)
    return path


def write_store(folder: Path, **options: Any) -> tuple[Path, Path]:
    """A tiny target in ``folder`` and a feature store of 24 answers of 20 random tokens to prompts of 6."""
    from dflash_plugins.train.answers import Answer, build_store

    made = write_target(folder / "target")
    ids = torch.randint(3, 60, (24, 26), generator=torch.Generator().manual_seed(3)).tolist()
    build_store([Answer(row[:6], row[6:], "test") for row in ids], made, [0, 2], folder / "store", **options)
    return made, folder / "store"


def smallest(method: str = "dflash", *, draft: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """``raw_config`` of a drafter small enough for plain loops: hidden 16, 40 tokens, block 5 (K = 4)."""
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "vocab_size": 40, "block_size": 5,
    }  # fmt: skip
    nested: dict[str, Any] = {"mask_token_id": 39}
    if method == "dflash2":
        nested |= {"conv_group_size": 4, "selector_top_k": 3, "selector_rank": 4}
        sizes["sliding_window"] = 6
    return raw_config(method, draft=nested | (draft or {}), **(sizes | top))


def drafter(raw: dict[str, Any], weights: dict[str, Tensor] | None = None, *, lent: bool = True) -> Any:
    """A ``Drafter`` in memory with the weights of ``tensors(raw)``, the tensors of ``shared(raw)`` lent to it."""
    from dflash_plugins.config import read_draft_config
    from dflash_plugins.drafter import Drafter

    weights = tensors(raw) if weights is None else weights
    built = Drafter(read_draft_config(raw).require(), own_embedding="embed_tokens.weight" in weights)
    built.load_state_dict(weights, strict=True)
    if lent:
        built.bind(*shared(raw))
    return built.eval().requires_grad_(False)


def plain(
    raw: dict[str, Any], causal: Any = (False, False), windows: Any = (None, None), weights: Any = None
) -> oracle.OracleDrafter:
    """The oracle with the weights and lent tensors of ``drafter(raw)``; the caller says causality and windows."""
    arrays = {name: value.numpy() for name, value in (weights or tensors(raw)).items()}
    embedding, head = (tensor.numpy() for tensor in shared(raw))
    return oracle.OracleDrafter(raw, arrays, embedding, head, list(causal), list(windows))


def features(raw: dict[str, Any], rows: int, columns: int, seed: int = 3) -> Tensor:
    """Random target features [rows, columns, taps * Ht]."""
    width = len(raw["dflash_config"]["target_layer_ids"]) * raw.get("target_hidden_size", raw["hidden_size"])
    return torch.randn(rows, columns, width, generator=torch.Generator().manual_seed(seed))


def columns(features: Tensor) -> Tensor:
    """Positions 0..C-1 of every row of ``features``: int64 [R, C]."""
    return torch.arange(features.shape[1]).expand(features.shape[0], -1)
