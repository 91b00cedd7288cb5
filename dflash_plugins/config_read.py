"""Reading a drafter's configuration into its description, with every finding at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_plugins.config_models import DraftConfig, DraftReading, MethodName
from dflash_plugins.config_places import config_file, read_json, unknown_paths
from dflash_plugins.config_reader import BOOL, COUNT, INT, INTS, MAP, NUMBER, SIZE, STR, STRS, Reader, is_int
from dflash_plugins.config_rope import read_rope
from dflash_plugins.config_target import token_ids
from dflash_plugins.engines import foreign_architecture

OUR_ARCHITECTURES: Mapping[str, MethodName] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DLoopDraftModel": "dloop",
    # vLLM prefixes an architecture that neither starts nor ends with DFlash, and asks its registry for this one.
    "DFlashDLoopDraftModel": "dloop",
}
# Of each method, as released; speculators names its layouts by the same words.
ARCHITECTURE_OF: Mapping[str, str] = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dloop": "DLoopDraftModel",
}


_REQUIRED = (
    ("num_layers", "num_hidden_layers", COUNT),
    ("hidden_size", "hidden_size", SIZE),
    ("intermediate_size", "intermediate_size", SIZE),
    ("num_heads", "num_attention_heads", SIZE),
    ("num_kv_heads", "num_key_value_heads", SIZE),
    ("rms_norm_eps", "rms_norm_eps", NUMBER),
    ("vocab_size", "vocab_size", SIZE),
    ("max_position_embeddings", "max_position_embeddings", SIZE),
    ("block_size", "block_size", SIZE),
    ("mask_token_id", "mask_token_id", INT),
    ("target_layer_ids", "target_layer_ids", INTS),
)
_OPTIONAL = (
    ("attention_bias", BOOL),
    ("hidden_act", STR),
    ("draft_vocab_size", SIZE),
    ("num_target_layers", SIZE),
    ("input_embedding_scale", NUMBER),
    ("output_multiplier", NUMBER),
    ("final_logit_softcapping", NUMBER),
)
# Values that would change the computation in a way DraftConfig does not describe; the neutral value is fine.
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("attention_sink_bias", False, "attention sinks"),
    ("add_swa_attention_sink_bias", False, "attention sinks"),
    ("attention_value_scale", 1.0, "a scale on attention values"),
    ("partial_rotary_factor", 1.0, "rotary embedding of a part of each head"),
    ("is_neox_style", True, "interleaved rotary embedding"),
    ("logit_scale", 1.0, "a logit scale (output_multiplier is the key we read)"),
    ("use_aux_hidden_state", True, "a drafter without target features"),
    ("sample_from_anchor", False, "blocks that also sample at the anchor's own slot"),
    ("projector_type", None, "another projector"),
    ("mlp_bias", False, "biases in the MLP"),
    ("use_qk_norm", True, "attention without q and k norms"),
)


def _read_sizes(r: Reader) -> None:
    for field, key, kind in _REQUIRED:
        value = r.take(key, kind, field=field)
        r.put(field, tuple(value) if kind is INTS and value else value)
        if not r.present(key):
            _missing(r, key)
    for key, kind in _OPTIONAL:
        r.put(key, r.take(key, kind))
    if r.facts.get("final_logit_softcapping", 1.0) <= 0:
        del r.facts["final_logit_softcapping"]  # both engines read zero as "no cap"
    r.put("target_hidden_size", r.take("target_hidden_size", SIZE) or r.facts.get("hidden_size"))
    dtype = r.take("dtype", STR)
    r.put("dtype", dtype and dtype.removeprefix("torch."))


def _missing(r: Reader, key: str) -> None:
    path = r.path(key)
    if key == "mask_token_id" and r.entries.get(key):
        r.error(
            "mask-token-null", path, None, "is null, so the mask slots have no embedding", "set the trained mask id"
        )
    elif key == "target_layer_ids":
        r.error(
            "config-missing",
            path,
            None,
            "is missing; a formula would read other layers than most released drafters were trained on",
            "take the list from the drafter's training configuration",
        )
    else:
        r.error("config-missing", path, None, "is missing", f"add {path} as the drafter was trained")


def _read_head_dim(r: Reader) -> None:
    head_dim = r.take("head_dim", SIZE)
    hidden, heads = r.facts.get("hidden_size"), r.facts.get("num_heads")
    if head_dim is None and not r.present("head_dim") and hidden and heads:
        if hidden % heads == 0 and (hidden // heads == 128 or r.raw.get("model_type") != "qwen3"):
            head_dim = hidden // heads
        else:
            r.error(
                "config-missing",
                r.path("head_dim"),
                None,
                f"is missing; engines would take 128 or {hidden / heads:g}",
                "add head_dim",
            )
    r.put("head_dim", head_dim)
    kv_heads = r.facts.get("num_kv_heads")
    if heads and kv_heads and heads % kv_heads:
        path, message = r.path("num_key_value_heads"), f"does not divide the {heads} heads of num_attention_heads"
        r.error("heads", path, kv_heads, message, "take both from the drafter's training configuration")
    if head_dim is not None and head_dim % 2:
        message = "is odd, so a head has no two halves to rotate"
        r.error("head-dim", r.path("head_dim"), head_dim, message, "give the width of one head")
    value_dim = r.take("v_head_dim", INT)
    if value_dim is not None and head_dim is not None and value_dim != head_dim:
        r.unsupported("v_head_dim", value_dim, f"attention values of another width than {head_dim}")


def _read_activation(r: Reader) -> None:
    if r.facts.get("hidden_act", "silu") != "silu":
        r.unsupported("hidden_act", r.facts["hidden_act"], "another activation than silu")


def _read_unsupported(r: Reader) -> None:
    for key, neutral, what in _UNSUPPORTED:
        for entry in r.present(key):
            if entry.value != neutral:
                r.error(
                    "config-unsupported",
                    entry.path,
                    entry.value,
                    f"asks for {what}, which we do not compute",
                    "serve this drafter with an engine that does, without our plugin",
                )
                break
    if any(e.value for key in ("attention_sink_bias", "add_swa_attention_sink_bias") for e in r.present(key)[:1]):
        r.said.add("sinks")


def _read_attention(r: Reader) -> None:
    """What can be said of causality and windows, also where the kinds of the layers are not known."""
    layers = r.facts.get("num_layers")
    sliding = _layer_kinds(r, layers) if layers else None
    chosen = _chosen_causality(r)
    if chosen is False:
        r.said.add("non-causal")  # also where the number of layers is not known
    if chosen is not None:
        r.put("causal", (chosen,) * (layers or 0) or None)
    elif sliding is not None:
        r.put("causal", _causality_by_kind(r, sliding))
    r.put("windows", _windows(r, sliding))


def _layer_kinds(r: Reader, layers: int) -> tuple[bool, ...] | None:
    """Per layer, whether it slides; None after a finding."""
    types = r.take("layer_types", STRS)
    if types is None:
        return _kinds_without_types(r, layers)
    known = {"sliding_attention", "full_attention"}
    if len(types) != layers or set(types) - known:
        r.error(
            "layer-types",
            r.path("layer_types"),
            types,
            f"is not one of {sorted(known)} for each of {layers} layers",
            "give one type per drafter layer",
        )
        return None
    sliding = tuple(t == "sliding_attention" for t in types)
    # vLLM: use_swa makes every layer slide when the types name no sliding one.
    return (True,) * layers if r.take("use_swa", BOOL) and not any(sliding) else sliding


def _kinds_without_types(r: Reader, layers: int) -> tuple[bool, ...] | None:
    if r.present("layer_types"):
        return None
    use_swa = bool(r.take("use_swa", BOOL))
    if not use_swa and r.take("use_sliding_window", BOOL):
        r.error(
            "layer-types",
            r.path("layer_types"),
            None,
            "is missing while use_sliding_window is true; transformers would derive it from max_window_layers",
            "add layer_types, one per drafter layer",
        )
        return None
    return (use_swa,) * layers


def _chosen_causality(r: Reader) -> bool | None:
    """Top-level is_causal, then dflash_config.causal; None where neither is given."""
    explicit = r.take("is_causal", BOOL)
    nested = r.take("causal", BOOL)
    if explicit is not None and nested is not None and explicit != nested:
        r.warn(
            "config-conflict",
            f"{r.path('is_causal')} and {r.path('causal')}",
            {r.path("is_causal"): explicit, r.path("causal"): nested},
            "the two differ; the top level wins in vLLM, and SGLang reads no nested one",
            "keep one of them",
        )
    r.origins.pop("causal", None)
    chosen: bool | None = explicit if explicit is not None else nested
    if chosen is not None:
        r.origins["causal"] = r.path("causal" if explicit is None else "is_causal")
    return chosen


def _causality_by_kind(r: Reader, sliding: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """speculators' flag, then the type of each layer, then not causal."""
    if "speculators_model_type" in r.raw:
        return _speculators_causality(r, sliding)
    typed = bool(r.present("layer_types"))
    return tuple(typed and s for s in sliding)


def _speculators_causality(r: Reader, sliding: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """speculators trains full layers without causality and sliding ones as the flag says."""
    key = "sliding_window_non_causal"
    non_causal = r.take(key, BOOL)
    if non_causal is None and any(sliding):
        r.error(
            "config-missing",
            key,
            None,
            "is missing: it decides whether sliding layers are causal, and releases differ in its default",
            "add it as the drafter was trained",
        )
        return None
    if non_causal is False and not all(sliding):
        r.warn(
            "speculators-causality",
            key,
            False,
            "was trained with full layers that are not causal; vLLM reads it as causal for every layer",
            "write transformer_layer_config.is_causal, or serve with our plugin",
        )
    return tuple(s and non_causal is False for s in sliding)


def _windows(r: Reader, sliding: tuple[bool, ...] | None) -> tuple[int | None, ...] | None:
    """The window of each layer that slides; ``sliding`` None: some may."""
    nested, top = r.take("swa_window_size", INT), r.take("sliding_window", INT)
    if sliding is not None and not any(sliding):
        return (None,) * len(sliding)
    if nested is not None and top is not None and nested != top:
        both = {r.path("swa_window_size"): nested, r.path("sliding_window"): top}
        r.error(
            "config-conflict",
            " and ".join(both),
            both,
            "the two differ: vLLM takes the first, SGLang the second",
            "keep the one the drafter was trained with",
        )
    window = nested if nested is not None else top
    if window is None and sliding is None and not _names_sliding(r):
        return None
    if window is None or window < 1:
        r.error(
            "window-missing",
            r.path("sliding_window"),
            window,
            "is no window size, but layers slide",
            "set sliding_window in tokens",
        )
        return None
    if r.take("use_sliding_window", BOOL) is False and r.raw.get("model_type") == "qwen3":
        r.warn(
            "window-switched-off",
            r.path("use_sliding_window"),
            False,
            "makes transformers drop the window of layers that slide",
            "set use_sliding_window to true",
        )
    return None if sliding is None else tuple(window if s else None for s in sliding)


def _names_sliding(r: Reader) -> bool:
    return any(isinstance(e.value, list) and "sliding_attention" in e.value for e in r.present("layer_types"))


def _read_mask(r: Reader) -> None:
    mask, rows = r.facts.get("mask_token_id"), r.facts.get("vocab_size")
    path = r.path("mask_token_id")
    if mask is None:
        return
    if mask < 0:
        r.error("mask-token-range", path, mask, "is negative", "set the id of the trained mask token")
    elif rows is not None and mask >= rows:
        r.error(
            "mask-token-range",
            path,
            mask,
            f"lies beyond the {rows} rows of the embedding (vocab_size)",
            "set an id inside the embedding; one past the tokenizer's last is fine",
        )
    for key in ("eos_token_id", "pad_token_id"):
        for entry in r.present(key)[:1]:
            if mask in token_ids(entry.value):
                r.warn(
                    "mask-token-shared",
                    path,
                    mask,
                    f"is also {entry.path}",
                    "make sure the drafter was trained with this id as its mask",
                )


def _read_layers_ids(r: Reader) -> None:
    ids, layers = r.facts.get("target_layer_ids"), r.facts.get("num_target_layers")
    if ids is None:
        return
    path = r.origins.get("target_layer_ids", r.path("target_layer_ids"))
    wrong = [i for i in ids if i < 0 or (layers is not None and i >= layers)]
    if wrong:
        r.error(
            "target-layer-range",
            path,
            list(ids),
            f"holds {wrong}, which are no layers of the target",
            "give 0-based layers whose OUTPUT is read (speculators' ids are one higher)",
        )
    mend = "take the list from the drafter's training configuration"
    if len(set(ids)) != len(ids):
        message = "names a layer twice; engines read it once, so that the features are narrower than fc"
        r.error("target-layer-repeated", path, list(ids), message, mend)
    if list(ids) != sorted(ids):
        message = "is not in rising order, in which vLLM concatenates the features whatever the list says"
        r.warn("target-layer-order", path, list(ids), message, mend)


def _read_architecture(r: Reader) -> None:
    kind = r.raw.get("speculators_model_type")
    if kind is not None or "transformer_layer_config" in r.raw:
        r.said.add("flat-layout")
    names = r.raw.get("architectures")
    if kind is not None:
        name, path = ARCHITECTURE_OF.get(str(kind), str(kind)), "speculators_model_type"
    elif isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        name, path = names[0], "architectures"
    else:
        r.error(
            "architecture-missing",
            "architectures",
            names,
            "does not name one architecture",
            f"name one of {', '.join(OUR_ARCHITECTURES)}",
        )
        return
    if name in OUR_ARCHITECTURES:
        r.put("architecture", "DLoopDraftModel" if OUR_ARCHITECTURES[name] == "dloop" else name)
        r.put("method", OUR_ARCHITECTURES[name])
    else:
        _foreign_architecture(r, path, name)


def _foreign_architecture(r: Reader, path: str, name: str) -> None:
    foreign = foreign_architecture(name)
    if foreign is None:
        r.error(
            "architecture-unknown", path, name, "is no architecture we know", f"ours: {', '.join(OUR_ARCHITECTURES)}"
        )
        return
    r.error(
        "architecture-foreign", path, name, f"is {foreign.what}, not a drafter of ours; {foreign.served}", foreign.mend
    )


def _read_pair(r: Reader, first: str, second: str, field: str, names: tuple[str, str]) -> None:
    """Two keys that only mean something together."""
    a, b = r.take(first, SIZE), r.take(second, SIZE)
    if (a is None) != (b is None):
        lone, lost = (first, second) if b is None else (second, first)
        r.error("config-missing", r.path(lost), None, f"is missing beside {r.path(lone)}", f"add {r.path(lost)}")
    elif a is not None:
        r.put(field, {names[0]: a, names[1]: b})


def _read_method_keys(r: Reader) -> None:
    _read_pair(r, "selector_top_k", "selector_rank", "selector", ("top_k", "rank"))
    _read_pair(r, "conv_kernel_size", "conv_group_size", "conv", ("kernel_size", "group_size"))
    method = r.facts.get("method")
    for field, keys in (
        ("selector", ("selector_top_k", "selector_rank")),
        ("conv", ("conv_kernel_size", "conv_group_size")),
    ):
        given = [k for k in keys if r.present(k)]
        if method == "dflash2" and not given:
            for key in keys:
                r.error("config-missing", r.path(key), None, "is missing; DFlash 2 needs it", f"add {r.path(key)}")
        if method == "dflash" and given:
            r.error(
                "method-conflict",
                r.path(given[0]),
                r.facts.get(field),
                f"belongs to DFlash 2, but {r.facts['architecture']} drops it without a word",
                "name the architecture DFlash2DraftModel, or remove the key",
            )
    _check_conv(r)
    _check_selector(r)
    _read_loop(r, method)


def _check_conv(r: Reader) -> None:
    conv, hidden = r.facts.get("conv"), r.facts.get("hidden_size")
    if conv and hidden and conv["group_size"] > 0 and hidden % conv["group_size"]:
        r.error(
            "conv-group",
            r.path("conv_group_size"),
            conv["group_size"],
            f"does not divide hidden_size {hidden}",
            "take both from the drafter's training configuration",
        )


def _check_selector(r: Reader) -> None:
    """A walk over more candidates than there are tokens ends in the first round."""
    selector, sizes = r.facts.get("selector"), [r.facts.get(name) for name in ("draft_vocab_size", "vocab_size")]
    tokens = min((size for size in sizes if size), default=None)
    if selector and tokens and selector["top_k"] > tokens:
        message = f"is more candidates per slot than the {tokens} tokens that the drafter knows"
        mend = "take it from the drafter's training configuration"
        r.error("selector-top-k", r.path("selector_top_k"), selector["top_k"], message, mend)


def _read_loop(r: Reader, method: str | None) -> None:
    loop = r.take("dloop", MAP)
    path = r.path("dloop")
    if loop is None:
        if method == "dloop" and not r.present("dloop"):
            r.error(
                "config-missing",
                path,
                None,
                "is missing; a D-Loop drafter needs it",
                'add {"mode": "refine", "prefix_lengths": [...]}',
            )
        return
    if method in ("dflash", "dflash2"):
        r.error(
            "method-conflict",
            path,
            loop,
            f"belongs to D-Loop, but {r.facts['architecture']} drops it without a word",
            "name the architecture DLoopDraftModel, or remove the key",
        )
    keys = {"refine": {"prefix_lengths"}, "extend": {"max_loops", "gate"}}.get(str(loop.get("mode")))
    if keys is None:
        r.error("loop-mode", f"{path}.mode", loop.get("mode"), "is neither refine nor extend", "name one of them")
        return
    for key in sorted(loop.keys() - keys - {"mode"}):
        r.error("loop-key", f"{path}.{key}", loop[key], f"is no key of mode {loop['mode']}", f"known: {sorted(keys)}")
    for key in sorted(keys - loop.keys()):
        r.error(
            "config-missing", f"{path}.{key}", None, f"is missing; mode {loop['mode']} needs it", f"add {path}.{key}"
        )
    if keys == loop.keys() - {"mode"} and _loop_values_fit(r, path, loop):
        r.put("loop", {k: tuple(v) if isinstance(v, list) else v for k, v in loop.items()})


def _loop_values_fit(r: Reader, path: str, loop: Mapping[str, Any]) -> bool:
    if loop["mode"] == "extend":
        fits = is_int(loop["max_loops"]) and loop["max_loops"] > 0 and NUMBER.accepts(loop["gate"])
        if not fits:
            r.error(
                "loop-extend",
                path,
                dict(loop),
                "needs max_loops >= 1 and a finite gate (a sum of ln q)",
                'for example {"mode": "extend", "max_loops": 3, "gate": -0.75}',
            )
        return fits
    lengths, block = loop["prefix_lengths"], r.facts.get("block_size")
    k = math.inf if block is None else block - 1
    fits = isinstance(lengths, list) and all(map(is_int, lengths)) and all(0 < m < k for m in lengths)
    if not fits or any(a >= b for a, b in pairwise(lengths)):
        r.error(
            "loop-prefix-lengths",
            f"{path}.prefix_lengths",
            lengths,
            f"must rise strictly between 0 and K = {k}",
            "for example [1, 3] at block_size 8",
        )
        return False
    return True


def _read_target_hints(r: Reader) -> None:
    """What a drafter says of its target beside sizes: the ids of the end, and the architecture speculators notes."""
    eos = tuple(i for entry in r.present("eos_token_id")[:1] for i in token_ids(entry.value))
    r.put("eos_token_ids", eos or None)
    noted = r.raw.get("speculators_config")
    verifier = noted.get("verifier") if isinstance(noted, dict) else None
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        r.put("target_architectures", tuple(names))


def _read_unknown(r: Reader) -> None:
    for path, value in unknown_paths(r.raw):
        r.warn("config-unknown-key", path, value, "is read by nothing of ours", "check the spelling, or remove it")
    for entry in r.present("quantization_config")[:1]:
        r.warn(
            "quantised",
            entry.path,
            entry.value,
            "announces quantised tensors; only plain ones are read",
            "use the drafter's unquantised weights",
        )


def _build(r: Reader) -> DraftConfig | None:
    """The description, if every required fact is there; pydantic's own objections become findings."""
    required = {name for name, field in DraftConfig.model_fields.items() if field.is_required()}
    if required - r.facts.keys():
        return None
    try:
        return DraftConfig(**{name: value for name, value in r.facts.items() if name in DraftConfig.model_fields})
    except ValidationError as error:
        for problem in error.errors():
            field = ".".join(str(p) for p in problem["loc"])
            r.error("config-value", r.origins.get(field, field), problem["input"], problem["msg"], "correct the value")
        return None


_STEPS = (
    _read_architecture, _read_sizes, _read_head_dim, _read_activation, read_rope, _read_attention, _read_mask,
    _read_layers_ids, _read_method_keys, _read_unsupported, _read_target_hints, _read_unknown,
)  # fmt: skip


def read_draft_config(source: Path | str | Mapping[str, Any]) -> DraftReading:
    """Any published drafter layout as one description, with every finding at once.

    ``source`` is a directory that holds config.json, that file, or its content. A missing path or malformed JSON raises
    ``BadInput`` naming the path; everything inside the configuration becomes a finding.
    """
    if isinstance(source, Mapping):
        raw, subject = source, "the drafter's configuration"
    else:
        file = config_file(Path(source), "drafter")
        raw, subject = read_json(file), f"drafter {file}"
    reader = Reader(raw)
    for step in _STEPS:
        step(reader)
    config = _build(reader)
    facts, origins, said = dict(reader.facts), dict(reader.origins), frozenset(reader.said)
    return DraftReading(subject, config, tuple(reader.findings), facts, origins, said)
