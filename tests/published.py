"""Pairs as they are published, given as headers: folders with config.json and tensor files without their data.

Sizes are written by hand from the published configurations, and so are the names and shapes of tensors: a test of the
checker never meets its own tables here.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_plugins.hub import Model
from dflash_plugins.report import CheckReport
from dflash_plugins.serve import check

FIXTURES = Path(__file__).parent / "fixtures" / "configs"
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1, "BOOL": 1}
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def write_header(file: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], *, data: bool = False) -> None:
    """A safetensors file of the given tensors, without its data, or with a hole in its place (``data``)."""
    entries, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        if data:
            stream.truncate(8 + len(header) + end)


def drafter_shapes(raw: Mapping[str, Any], *, taps: int, target_hidden: int, dtype: str = "BF16") -> Shapes:
    """Tensors of a drafter of the released or of speculators' flat layout."""
    layer = raw.get("transformer_layer_config", raw)
    own = {**raw, **(raw.get("dflash_config") or {})}
    hidden, inner, head = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * head, layer["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * target_hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    one = {
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden), "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner), "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    if own.get("conv_kernel_size"):
        taps_of, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
        for side in ("attention_conv", "mlp_conv"):
            one[f"{side}.base_kernel"] = (2, taps_of, hidden)
            one[f"{side}.kernel_projection.weight"] = (2 * taps_of * groups, hidden)
    if own.get("attention_sink_bias"):
        one["self_attn.attention_sink_bias"] = (layer["num_attention_heads"],)
    for index in range(layer["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in one.items()}
    if own.get("selector_rank"):
        for book in ("predecessor", "successor"):
            shapes[f"candidate_selector.{book}_codebook"] = (layer["vocab_size"], own["selector_rank"])
        shapes["candidate_selector.hidden_projection.weight"] = (own["selector_rank"], hidden)
    found: Shapes = {name: (dtype, shape) for name, shape in shapes.items()}
    if own.get("draft_vocab_size") not in (None, layer.get("vocab_size")):
        found["lm_head.weight"] = (dtype, (own["draft_vocab_size"], hidden))
        found["d2t"] = ("I64", (own["draft_vocab_size"],))
    return found


def target_config(architecture: str, layers: int, hidden: int, vocab: int, **more: Any) -> dict[str, Any]:
    text = {
        "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab, "dtype": "bfloat16",
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    } | more  # fmt: skip
    return {"architectures": [architecture], **text}


def target_shapes(raw: Mapping[str, Any]) -> Shapes:
    """The ends of a target and one tensor for each of its layers: enough for heads, vocabularies and memory."""
    text = raw.get("text_config", raw)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes: Shapes = {f"{end}.weight": ("BF16", (vocab, hidden)) for end in ("model.embed_tokens", "lm_head")}
    layers = range(text["num_hidden_layers"])
    return shapes | {f"model.layers.{i}.mlp.down_proj.weight": ("BF16", (hidden, 4 * hidden)) for i in layers}


@dataclass
class Pair:
    """A pair and what is planned with it, all of which a test may change before it is written."""

    draft: dict[str, Any]
    draft_header: Shapes
    target: dict[str, Any]
    engine: str = "vllm"
    version: str | None = "0.31.0"
    k: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    target_header: Shapes | None = None
    draft_files: dict[str, Any] = field(default_factory=dict)
    target_files: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Pair:
        return copy.deepcopy(self)

    def write(self, folder: Path, *, data: bool = True) -> tuple[Path, Path]:
        """Folders of the target and of the drafter."""
        target, draft = folder / "target", folder / "draft"
        target.mkdir(parents=True)
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(self.draft))
        (target / "config.json").write_text(json.dumps(self.target))
        (target / "generation_config.json").write_text(json.dumps(self.generation))
        write_header(draft / "model.safetensors", self.draft_header, data=data)
        write_header(target / "model.safetensors", self.target_header or target_shapes(self.target), data=data)
        for place, files in ((draft, self.draft_files), (target, self.target_files)):
            for name, content in files.items():
                (place / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return target, draft

    def check(self, folder: Path, **options: Any) -> CheckReport:
        target, draft = self.write(folder, **options)
        models = Model(str(target), target), Model(str(draft), draft)
        return check(self.engine, *models, k=self.k, version=self.version, settings=self.settings)


def _pair(raw: dict[str, Any], target: dict[str, Any], **more: Any) -> Pair:
    own = {**raw, **(raw.get("dflash_config") or {})}
    ids = own.get("target_layer_ids") or own.get("aux_hidden_state_layer_ids")
    hidden = target.get("text_config", target)["hidden_size"]
    return Pair(raw, drafter_shapes(raw, taps=len(ids), target_hidden=hidden), target, **more)


def qwen3_8b() -> Pair:
    raw = fixture("legacy_top_level_b16") | {"hidden_size": 4096, "intermediate_size": 12288}
    target = target_config("Qwen3ForCausalLM", 36, 4096, 151936, rope_theta=1000000, max_position_embeddings=40960)
    return _pair(raw, target | {"eos_token_id": 151645, "bos_token_id": 151643})


def qwen38_27b_dflash2() -> Pair:
    """64 layers, three of four with linear attention, and eyes."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 16
    text = target_config("x", 64, 5120, 248320, layer_types=kinds, full_attention_interval=4)
    text |= {"rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25}, "eos_token_id": 248044}
    text |= {"num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16}
    del text["architectures"]
    target = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 27}}
    generation = {"eos_token_id": [248046, 248044], "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    return _pair(fixture("dflash2_b8"), target, generation=generation)


def qwen36_35b_retrain() -> Pair:
    target = target_config("Qwen3_5MoeForConditionalGeneration", 40, 2048, 248320, full_attention_interval=4)
    target |= {"rope_parameters": {"rope_theta": 10000000}, "num_key_value_heads": 2, "head_dim": 256}
    return _pair(fixture("ids_at_three_places_b16"), target)


def mixed_layers() -> Pair:
    pair = qwen36_35b_retrain()
    return _pair(fixture("nested_mixed_layers_b16"), pair.target)


def speculators_dflash() -> Pair:
    target = target_config("Gemma4ForConditionalGeneration", 60, 5376, 262144, rope_theta=1000000)
    return _pair(fixture("speculators_dflash_b8"), target)


def speculators_dflash2() -> Pair:
    return _pair(fixture("speculators_dflash2_b8"), qwen3_8b().target)


def muse_glimmer_dflash2() -> Pair:
    target = target_config("MuseGlimmerForConditionalGeneration", 52, 6656, 202048, rope_theta=500000)
    return _pair(fixture("dflash2_softcap_b16"), target | {"eos_token_id": 200001})


def muse_glimmer_assistant() -> Pair:
    """Names of its own, and no vocab_size."""
    raw = fixture("dflash2_softcap_b16")
    raw |= {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    del raw["vocab_size"], raw["is_causal"]
    raw["dflash_config"] = {"block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49]}
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    header = drafter_shapes(raw, taps=5, target_hidden=6656)
    header = {names.get(name, name): entry for name, entry in header.items()}
    return Pair(raw, header, muse_glimmer_dflash2().target)


def mimo() -> Pair:
    """Attention sinks, a scale on values, a part of each head rotated: vLLM computes them, we do not."""
    target = target_config("MiMoV2ForCausalLM", 70, 6144, 152064, rope_theta=10000)
    return _pair(fixture("use_swa_attention_sinks_b8"), target)


def laguna() -> Pair:
    raw = fixture("legacy_top_level_b16") | {"architectures": ["DFlashLagunaForCausalLM"], "gating": True}
    raw |= {"hidden_size": 3072, "target_layer_count": 48, "model_type": "laguna", "vocab_size": 100352}
    del raw["num_target_layers"]
    raw["dflash_config"] = {"block_size": 16, "mask_token_id": 100300, "target_layer_ids": [1, 12, 23, 34, 45]}
    header = drafter_shapes(raw, taps=5, target_hidden=3072)
    header |= {f"layers.{i}.self_attn.g_proj.weight": ("BF16", (32, 3072)) for i in range(5)}
    return Pair(raw, header, target_config("LagunaForCausalLM", 48, 3072, 100352, rope_theta=1000000))


PUBLISHED = {
    one.__name__: one
    for one in (
        qwen3_8b, qwen38_27b_dflash2, qwen36_35b_retrain, mixed_layers, speculators_dflash, speculators_dflash2,
        muse_glimmer_dflash2, muse_glimmer_assistant, mimo, laguna,
    )
}  # fmt: skip
