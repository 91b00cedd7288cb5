"""Faults that users report, each as a change to a pair that is right, and the finding that has to name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from published import Pair, target_shapes

ERROR, WARNING, INFO = "error", "warning", "info"
DELETED = object()


@dataclass(frozen=True)
class Fault:
    """``touches`` names what is changed: two faults that share a name are not injected together."""

    name: str
    change: Callable[[Pair], None]
    code: str
    severity: str
    touches: tuple[str, ...]
    words: str = ""


FAULTS: list[Fault] = []


def fault(name: str, code: str, severity: str, *touches: str, words: str = "") -> Callable[..., Any]:
    def keep(change: Callable[[Pair], None]) -> Callable[[Pair], None]:
        FAULTS.append(Fault(name, change, code, severity, touches, words))
        return change

    return keep


def _config(name: str, code: str, severity: str, value: Any, *, words: str = "", touches: tuple[str, ...] = ()) -> None:
    """A key of the drafter's config.json (``dflash_config.KEY``) that is set, or removed."""

    def change(pair: Pair) -> None:
        section, _, key = name.rpartition(".")
        holder = pair.draft[section] if section else pair.draft
        if value is DELETED:
            del holder[key]
        else:
            holder[key] = value

    FAULTS.append(
        Fault(f"{name}={'' if value is DELETED else value}", change, code, severity, touches or (name,), words)
    )


def _target(key: str, code: str, severity: str, value: Any, *touches: str) -> None:
    def change(pair: Pair) -> None:
        pair.target["text_config"][key] = value
        pair.target_header = None

    FAULTS.append(Fault(f"target {key}={value}", change, code, severity, (key, *touches)))


def _set(code: str, severity: str, *touches: str, version: str | None = None, words: str = "", **settings: Any) -> None:
    """Settings of the planned launch; ``__`` stands for a dot."""

    def change(pair: Pair) -> None:
        pair.settings |= {key.replace("__", "."): value for key, value in settings.items()}
        pair.version = version or pair.version

    marks = ("version",) if version else ()
    FAULTS.append(Fault(f"{settings} {version or ''}", change, code, severity, (*settings, *touches, *marks), words))


IDS = "dflash_config.target_layer_ids"
MASK = "dflash_config.mask_token_id"
_config(IDS, "config-missing", ERROR, DELETED, words="formula", touches=(IDS, "fc"))
_config(IDS, "target-layer-range", ERROR, [5, 19, 33, 47, 64])
_config(IDS, "target-layer-range", ERROR, [-1, 19, 33, 47, 61])
_config(IDS, "target-layer-repeated", ERROR, [5, 19, 19, 47, 61])
_config(IDS, "target-layer-order", WARNING, [5, 33, 19, 47, 61], words="rising")
_config(IDS, "fc-width", ERROR, [5, 19, 33, 47], touches=(IDS, "fc"))
_config(MASK, "config-missing", ERROR, DELETED)
_config(MASK, "mask-token-null", ERROR, None)
_config(MASK, "mask-token-range", ERROR, -1)
_config(MASK, "mask-token-range", ERROR, 248320, touches=(MASK, "vocab_size"))
_config(MASK, "mask-token-shared", WARNING, 248044)
_config(MASK, "mask-token-shared", WARNING, 248046)
_config("dflash_config.block_size", "config-missing", ERROR, DELETED, touches=("dflash_config.block_size", "k"))
_config("block_size", "config-conflict", ERROR, 99, words="disagree", touches=("dflash_config.block_size", "k"))
_config("vocab_size", "config-missing", ERROR, DELETED, touches=("vocab_size", MASK))
_config("vocab_size", "pair-vocabulary", ERROR, 248384, touches=("vocab_size", MASK, "tensors", "selector"))
_config("num_target_layers", "pair-target-layers", ERROR, 48)
_config("architectures", "architecture-unknown", ERROR, ["NobodyKnowsMe"], touches=("architectures", "method"))
_config("architectures", "architecture-foreign", ERROR, ["DFlash2BeamDraftModel"], touches=("architectures", "method"))
_config("architectures", "architecture-foreign", ERROR, ["Qwen3XPressModel"], touches=("architectures", "method"))
_config(
    "architectures",
    "architecture-foreign",
    ERROR,
    ["Qwen3_5MTP"],
    words="method mtp",
    touches=("architectures", "method"),
)
_config(
    "architectures", "method-conflict", ERROR, ["DFlashDraftModel"], words="drops it",
    touches=("architectures", "method", "selector", "tensors"),
)  # fmt: skip
_config("rope_parameters", "pair-rope-theta", WARNING, {"rope_theta": 10000}, words="1000")
_config("rope_parameters", "config-missing", ERROR, DELETED)
_config("rope_parameters", "rope-scaling", ERROR, {"rope_theta": 10000000, "rope_type": "yarn"}, words="factor")
_config("rope_parameters", "rope-scaling", ERROR, {"rope_theta": 10000000, "rope_type": "warp", "factor": 2.0})
_config(
    "rope_parameters", "vllm-mrope", ERROR,
    {"rope_theta": 10000000, "rope_type": "default", "mrope_section": [24, 20, 20]},
)  # fmt: skip
_config("num_hidden_layers", "config-missing", ERROR, DELETED, touches=("num_hidden_layers", "layer_types"))
_config("rope_theta", "config-conflict", ERROR, 10000, touches=("rope_parameters",))
_config("dtype", "dtype-config", WARNING, "float16", words="bfloat16", touches=("dtype-config",))
_config("sliding_window", "window-missing", ERROR, None)
_config("dflash_config.swa_window_size", "config-conflict", ERROR, 512, touches=("sliding_window",))
_config("layer_types", "layer-types", ERROR, ["sliding_attention"] * 4)
_config("head_dim", "config-type", ERROR, "128", touches=("head_dim", "tensors", "heads"))
_config("num_key_value_heads", "heads", ERROR, 5, touches=("heads", "tensors"))
_config("dflash_config.conv_group_size", "conv-group", ERROR, 48, touches=("conv", "tensors"))
_config("dflash_config.selector_top_k", "selector-top-k", ERROR, 10**6, touches=("selector", "vocab_size"))
_config("dflash_config.selector_rank", "config-missing", ERROR, DELETED, touches=("selector",))
_config("dflash_config.swa_windw_size", "config-unknown-key", WARNING, 4)
_config("quantization_config", "quantised", WARNING, {"quant_method": "fp8"})
_config("dflash_config.dloop", "method-conflict", ERROR, {"mode": "refine", "prefix_lengths": [1]}, touches=("method",))
_config("dflash_config.sample_from_anchor", "config-unsupported", ERROR, True)
_config("dflash_config.projector_type", "config-unsupported", ERROR, "domino")
_config("max_position_embeddings", "positions-served", WARNING, 32768, words="262144")
_config("eos_token_id", "pair-eos", WARNING, 2, words="another target")
_config(
    "speculators_config", "pair-architecture", WARNING, {"verifier": {"architectures": ["Qwen3ForCausalLM"]}},
    words="Qwen3_5ForConditionalGeneration",
)  # fmt: skip
_config("output_multiplier", "vllm-reads-scaling-nested-only", WARNING, 0.5, touches=("scale", "method"))
_target("hidden_size", "pair-hidden-size", ERROR, 4096, "target head")
_target("num_hidden_layers", "pair-target-layers", ERROR, 48, "num_target_layers", "layer_types", IDS)
_target("vocab_size", "pair-vocabulary", ERROR, 151936, MASK, "target head")
_target("dtype", "dtype-range", WARNING, "float16", "target dtype", "target head")
_set("dtype-range", ERROR, "target dtype", dtype="float16", words="65504")
_set("dtype-range", ERROR, "target dtype", dtype="half")
_set("units-other-engine", WARNING, "k", num_speculative_tokens=8, words="did you mean 7?")
_set("engine-too-old", ERROR, "method", version="0.27.1", words="0.28.0")
_set("engine-too-old", ERROR, "method", version="0.21.0+empty")
_set("engine-version-unknown", WARNING, version="main")
_set("vllm-pipeline-parallel-v1", ERROR, pipeline_parallel_size=2, runner="v1")
_set("vllm-pipeline-parallel-v2", WARNING, pp=2, runner="v2")
_set("tensor-parallel", ERROR, tensor_parallel_size=3, words="32 heads")
_set("draft-tensor-parallel", ERROR, "tensor_parallel_size", tp=4, speculative_config__draft_tensor_parallel_size=2)
_set("vllm-context-parallel", WARNING, decode_context_parallel_size=2)
_set("vllm-data-parallel", WARNING, data_parallel_size=2)
_set("vllm-lora", WARNING, enable_lora=True)
_set("token-budget", ERROR, "k", max_num_batched_tokens=7, max_num_seqs=1)
_set("token-budget", WARNING, "k", max_num_batched_tokens=1024, max_num_seqs=256, words="2048")
_set("token-budget", ERROR, "k", max_num_batched_tokens=1024, max_num_seqs=256, version="0.28.0", words="not start")
_set("attention-backend", ERROR, attention_backend="ROCM_AITER_UNIFIED_ATTN", words="not causal")
_set("attention-backend", ERROR, "attention_backend", speculative_config__attention_backend="turboquant")
_set("attention-backend", WARNING, attention_backend="FLASH_MOON", words="known")
_set("attention-kv-dtype", ERROR, attention_backend="FLEX_ATTENTION", kv_cache_dtype="fp8", words="FLEX_ATTENTION")
_set("attention-kv-dtype", ERROR, "attention_backend", kv_cache_dtype="turboquant_4bit_nc", words="no attention")
_set("attention-kv-dtype", ERROR, "attention_backend", kv_cache_dtype="nvfp4")
_set("attention-backend", WARNING, attention_backend="FLASH_ATTN", kv_cache_dtype="fp8", words="9.0")
_set("vllm-kv-dtype-unseen", WARNING, kv_cache_dtype="fp8", version="0.28.0")
_set("vllm-hybrid-prefix-cache", WARNING, "enable_prefix_caching", version="0.28.1rc1.dev43+g6f7df92a8")
_set("vllm-logits-processors", ERROR, logits_processors="mine:Processor")
_set("vllm-synthetic-acceptance", ERROR, speculative_config__rejection_sample_method="synthetic")
_set("vllm-padded-batch", ERROR, speculative_config__disable_padded_drafter_batch=True)
_set("vllm-heterogeneous-vocabulary", ERROR, speculative_config__use_heterogeneous_vocab=True)
_set("vllm-draft-quantised", WARNING, speculative_config__quantization="fp8")
_set("vllm-misplaced-ranks", ERROR, speculative_config__tensor_parallel_size=2, words="draft_tensor_parallel_size")
_set("vllm-kv-connector", WARNING, kv_transfer_config='{"kv_connector": "X"}')
_set("positions-served", WARNING, speculative_config__max_model_len=4096, words="262144")
_set("setting-unknown", WARNING, max_model_length=4096, words="max_model_len")
_set("setting-type", ERROR, max_num_seqs="many")
_set("setting-twice", ERROR, "tensor_parallel_size", tensor_parallel_size=2, tp=4)
_set("draft-memory", ERROR, "memory", free_gib=0.4, words="does not fit")
_set(
    "weights-memory", ERROR, "memory", "tensor_parallel_size", "pipeline_parallel_size", "pp",
    memory_gib=16, gpu_memory_utilization=0.9,
)  # fmt: skip
_set("draft-kv", INFO, "heads", "num_hidden_layers", "attention_backend", tensor_parallel_size=2, words="10,240")


@fault("K beyond the block", "k-beyond-block", WARNING, "k", words="serve at most 7")
def _(pair: Pair) -> None:
    pair.k = 8


@fault("K below the block", "k-below-block", INFO, "k")
def _(pair: Pair) -> None:
    pair.k = 5


@fault("fewer columns in fc", "fc-width", ERROR, "fc", words="[5120, 20480]")
def _(pair: Pair) -> None:
    pair.draft_header["fc.weight"] = ("BF16", (5120, 20480))


@fault("quantised fc", "tensor-quantised", ERROR, "fc", words="unwritten")
def _(pair: Pair) -> None:
    del pair.draft_header["fc.weight"]
    pair.draft_header["fc.weight_packed"] = ("I32", (5120, 3200))
    pair.draft_header["fc.weight_scale"] = ("BF16", (5120, 200))


@fault("a drafter in 8 bits", "tensor-dtype", ERROR, "tensors", words="unquantised")
def _(pair: Pair) -> None:
    for name in [name for name in pair.draft_header if ".mlp." in name]:
        pair.draft_header[name] = ("F8_E4M3", pair.draft_header[name][1])


@fault("a missing tensor", "tensor-missing", ERROR, "tensors")
def _(pair: Pair) -> None:
    del pair.draft_header["layers.4.mlp.down_proj.weight"]


@fault("an unclaimed tensor", "tensor-unclaimed", ERROR, "gate")
def _(pair: Pair) -> None:
    pair.draft_header["layers.0.attn_gate.weight"] = ("BF16", (5120, 5120))


@fault("both spellings", "tensor-twice", ERROR, "codebook")
def _(pair: Pair) -> None:
    name = "candidate_selector.predecessor_codebook"
    pair.draft_header[f"{name}.weight"] = pair.draft_header[name]


@fault("a wrong shape", "tensor-shape", ERROR, "norm")
def _(pair: Pair) -> None:
    pair.draft_header["norm.weight"] = ("BF16", (5121,))


@fault("tensors of several dtypes", "dtype-mixed", WARNING, "hidden_norm")
def _(pair: Pair) -> None:
    pair.draft_header["hidden_norm.weight"] = ("F32", (5120,))


@fault("a mask embedding", "mask-embedding-file", WARNING, "files")
def _(pair: Pair) -> None:
    pair.draft_files["mask_embedding.pt"] = ""


@fault("another tokenizer", "pair-tokenizer", ERROR, "tokenizer", words="7 (")
def _(pair: Pair) -> None:
    ours = {f"t{i}": i for i in range(12)}
    pair.target_files["tokenizer.json"] = {"model": {"vocab": ours}}
    pair.draft_files["tokenizer.json"] = {"model": {"vocab": ours | {"t7": 99, "other": 7}}}


@fault("another vocabulary in the old files", "pair-tokenizer", ERROR, "tokenizer")
def _(pair: Pair) -> None:
    pair.target_files["tokenizer.json"] = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 2, "content": "c"}],
    }
    pair.draft_files |= {"vocab.json": {"a": 0, "b": 1}, "added_tokens.json": {"d": 2}}


@fault("min_p by default", "vllm-generation-min-p", ERROR, "generation", words="refuses min_p")
def _(pair: Pair) -> None:
    pair.generation["min_p"] = 0.05


@fault("a quantised head", "vllm-quantised-head", ERROR, "target head", "version", "method", words="0.31.0")
def _(pair: Pair) -> None:
    pair.version = "0.28.0"
    pair.target_header = target_shapes(pair.target)
    del pair.target_header["lm_head.weight"]
    pair.target_header["lm_head.weight_packed"] = ("U8", (248320, 2560))
