"""Rules on a drafter and its target, and the same as functions for whoever holds only some of the facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_plugins.config_models import DraftConfig, LoopConfig, TargetConfig
from dflash_plugins.config_places import read_json
from dflash_plugins.config_reader import is_int
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.rules import Facts, Hit, Rule, run

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
OTHER_TARGET = "use the target the drafter was trained for"


def _fc_width(f: Facts) -> Iterator[Hit]:
    features = f.draft.get("target_hidden_size")
    if f.target and features not in (None, f.target.hidden_size):
        yield Hit("target_hidden_size", features, {"width": f.target.hidden_size})


def _shared_embedding(f: Facts) -> Iterator[Hit]:
    hidden = f.draft.get("hidden_size")
    fits = f.target and f.draft.get("target_hidden_size") in (None, f.target.hidden_size)
    if f.target and fits and hidden not in (None, f.target.hidden_size) and f.own_embedding is False:
        yield Hit("hidden_size", hidden, {"width": f.target.hidden_size})


def _target_layers(f: Facts) -> Iterator[Hit]:
    layers = f.draft.get("num_target_layers")
    if f.target and layers not in (None, f.target.num_layers):
        yield Hit("num_target_layers", layers, {"layers": f.target.num_layers})


def _layer_range(f: Facts) -> Iterator[Hit]:
    ids = f.draft.get("target_layer_ids") or ()
    wrong = [i for i in ids if f.target and not 0 <= i < f.target.num_layers]
    if f.target and wrong:
        yield Hit("target_layer_ids", list(ids), {"wrong": wrong, "layers": f.target.num_layers})


def _vocabulary(f: Facts) -> Iterator[Hit]:
    vocab = f.draft.get("vocab_size")
    if f.target and vocab not in (None, f.target.vocab_size):
        kind = "padded otherwise, or for" if vocab > f.target.vocab_size else "for"
        yield Hit("vocab_size", vocab, {"rows": f.target.vocab_size, "kind": kind})


def _mask_range(f: Facts) -> Iterator[Hit]:
    mask = f.draft.get("mask_token_id")
    if f.target and mask is not None and mask >= f.target.vocab_size:
        yield Hit("mask_token_id", mask, {"rows": f.target.vocab_size})


def _mask_shared(f: Facts) -> Iterator[Hit]:
    mask = f.draft.get("mask_token_id")
    if f.target and mask is not None and mask in (*f.target.eos_token_ids, f.target.pad_token_id):
        yield Hit("mask_token_id", mask)


def _theta(f: Facts) -> Iterator[Hit]:
    theta, other = f.draft.get("rope_theta"), f.target.rope_theta if f.target else None
    if theta is None or other is None or min(theta, other) <= 0 or theta == other:
        return
    yield Hit("rope_theta", theta, {"other": f"{other:g}", "ratio": f"{max(theta, other) / min(theta, other):g}"})


def _eos(f: Facts) -> Iterator[Hit]:
    ours, theirs = f.draft.get("eos_token_ids") or (), f.target.eos_token_ids if f.target else ()
    if ours and theirs and not set(ours) & set(theirs):
        yield Hit("eos_token_id", list(ours), {"theirs": list(theirs)})


def _noted_target(f: Facts) -> Iterator[Hit]:
    noted = f.draft.get("target_architectures") or ()
    if f.target and noted and f.target.architecture not in noted:
        yield Hit("speculators_config.verifier.architectures", list(noted), {"here": f.target.architecture})


def _tokenizers(f: Facts) -> Iterator[Hit]:
    """Only ids that both have room for count: a longer tail is padding."""
    if f.draft_vocabulary is None or f.target_vocabulary is None:
        return
    ours, theirs = ({i: t for t, i in v.items()} for v in (f.target_vocabulary, f.draft_vocabulary))
    rows = min(max(ours, default=-1), max(theirs, default=-1))
    differing = sorted(i for i in ours.keys() | theirs.keys() if i <= rows and ours.get(i) != theirs.get(i))
    if differing:
        named = [f"{i} ({ours.get(i)!r} in the target, {theirs.get(i)!r} in the drafter)" for i in differing[:8]]
        shown = ", ".join([*named, *(["..."] if len(differing) > 8 else [])])
        yield Hit("tokenizer.json", differing, {"count": len(differing), "shown": shown})


def _dtype_range(f: Facts) -> Iterator[Hit]:
    stored, served = dtype_name(f.dtype), dtype_name(f.served_dtype)
    if served == "float16" and stored not in (None, served):
        yield Hit("dtype", served, {"stored": stored})


def _dtype_wider(f: Facts) -> Iterator[Hit]:
    stored, served = dtype_name(f.dtype), dtype_name(f.served_dtype)
    if stored not in (None, "float32") and served == "float32":
        yield Hit("dtype", served, {"stored": stored})


def _dtype_cast(f: Facts) -> Iterator[Hit]:
    stored, served = dtype_name(f.dtype), dtype_name(f.served_dtype)
    if stored is not None and served not in (None, "auto", "float16", "float32", stored):
        yield Hit("dtype", served, {"stored": stored})


def _target_dtype(f: Facts) -> Iterator[Hit]:
    """Where nobody asks for a dtype, engines serve the drafter in the target's."""
    stored, served = dtype_name(f.dtype), dtype_name(f.target.dtype) if f.target else None
    asked = f.served_dtype not in (None, "auto")
    if f.engine and not asked and stored == "bfloat16" and served == "float16":
        yield Hit("dtype", "auto", {"stored": stored, "served": served})


PAIR = (
    Rule(
        "pair-hidden-size", ERROR, _fc_width,
        "the target's residual stream is {width} wide, so fc does not fit its features", OTHER_TARGET,
    ),
    Rule(
        "pair-hidden-size", ERROR, _shared_embedding,
        "the drafter shares the target's embedding, which is {width} wide", OTHER_TARGET,
    ),
    Rule("pair-target-layers", ERROR, _target_layers, "the target has {layers} layers", OTHER_TARGET),
    Rule(
        "target-layer-range", ERROR, _layer_range, "{wrong} are no layers of a target with {layers}",
        f"{OTHER_TARGET}, or check whether the ids are speculators' (one higher)",
    ),
    Rule(
        "pair-vocabulary", ERROR, _vocabulary,
        "the target's embedding has {rows} rows: a drafter {kind} another vocabulary", OTHER_TARGET,
    ),
    Rule(
        "mask-token-range", ERROR, _mask_range, "lies beyond the {rows} rows of the target's embedding",
        "set an id inside the embedding; one past the tokenizer's last is fine",
    ),
    Rule(
        "mask-token-shared", WARNING, _mask_shared, "is the target's end or padding token as well",
        "make sure the drafter was trained with this id as its mask",
    ),
    Rule(
        "pair-rope-theta", WARNING, _theta, "the target has {other}, a ratio of {ratio}",
        "check the drafter's training configuration: a wrong theta is silent and costs accepted tokens",
    ),
    Rule(
        "pair-eos", WARNING, _eos, "shares no id with the target's ends {theirs}: perhaps a drafter of another target",
        "make sure it was trained for this target",
    ),
    Rule(
        "pair-architecture", WARNING, _noted_target, "names another target than {here}",
        "make sure it was trained for this target",
    ),
)  # fmt: skip
TOKENIZERS = (Rule("pair-tokenizer", ERROR, _tokenizers, "{count} ids mean different tokens: {shown}", OTHER_TARGET),)
DTYPES = (
    Rule(
        "dtype-range", ERROR, _dtype_range,
        "serves {stored} weights as float16: features beyond 65504 become infinite and drafts are lost",
        "serve {stored} or float32",
    ),
    Rule(
        "dtype-range", WARNING, _target_dtype,
        "serves the drafter's {stored} weights in the target's {served}: what exceeds 65504 becomes infinite",
        "serve both as {stored}",
    ),
    Rule("dtype-cast", WARNING, _dtype_cast, "weights are stored as {stored}", "{stored} is exact"),
    Rule("dtype-cast", INFO, _dtype_wider, "weights are stored as {stored}", "{stored} is exact"),
)  # fmt: skip


def _k_range(f: Facts) -> Iterator[Hit]:
    if f.k is not None and f.k < 1 and f.trained_k is not None:
        yield Hit("k", f.k, {"most": f.trained_k * _blocks(f)})


def _k_beyond(f: Facts) -> Iterator[Hit]:
    if f.k is not None and f.trained_k is not None and f.k > (most := f.trained_k * _blocks(f)):
        yield Hit("k", f.k, {"most": most, "block": f.trained_k + 1})


def _k_part(f: Facts) -> Iterator[Hit]:
    if f.k is not None and f.trained_k is not None and f.trained_k < f.k < f.trained_k * _blocks(f):
        yield Hit("k", f.k, {"k": f.trained_k})


def _k_below(f: Facts) -> Iterator[Hit]:
    if f.k is not None and f.trained_k is not None and 1 <= f.k < f.trained_k:
        yield Hit("k", f.k, {"k": f.trained_k})


def _blocks(f: Facts) -> int:
    """Mode extend drafts block after block: the engine's K is then a multiple of the block's."""
    loop = f.draft.get("loop") or {}
    return int(loop["max_loops"]) if loop.get("mode") == "extend" else 1


PROPOSALS = (
    Rule("k-range", ERROR, _k_range, "is no number of proposals", "give 1 to {most}"),
    Rule(
        "k-beyond-block", WARNING, _k_beyond,
        "goes beyond the trained block of {block}; acceptance may collapse at every slot", "serve at most {most}",
    ),
    Rule("k-part-block", WARNING, _k_part, "is no whole number of blocks of {k} proposals", "serve a multiple of {k}"),
    Rule(
        "k-below-block", INFO, _k_below,
        "is less than the {k} proposals of the trained block; fewer masks change every proposal",
        "{k} is what the drafter was trained with",
    ),
)  # fmt: skip


def pair_findings(
    draft: DraftConfig | Mapping[str, Any], target: TargetConfig, *, own_embedding: bool | None = None
) -> list[Finding]:
    """Whether a drafter fits a target.

    ``draft`` is a description or the facts of an incomplete one (``DraftReading.facts``); what is missing is not
    checked. ``own_embedding`` says whether the checkpoint ships its own token embedding (None: not known).
    """
    facts = draft.model_dump() if isinstance(draft, DraftConfig) else draft
    return run(PAIR, Facts(draft=facts, target=target, own_embedding=own_embedding))


def k_findings(config: DraftConfig, k: int | None) -> list[Finding]:
    """Whether K proposals per round suit the trained block."""
    return run(PROPOSALS, Facts(draft=config.model_dump(), k=k))


def serving_dtype_findings(stored: str | None, served: str | None) -> list[Finding]:
    """Whether weights stored as one dtype may be served as another; names as in ``dtype_name``."""
    return run(DTYPES, Facts(dtype=stored, served_dtype=served))


def tokenizer_findings(target: Mapping[str, int], draft: Mapping[str, int]) -> list[Finding]:
    """Whether two vocabularies (token to id) agree on every id that both have room for; a longer tail is padding."""
    return run(TOKENIZERS, Facts(target_vocabulary=target, draft_vocabulary=draft))


def loop_mode_finding(mode: str) -> Finding:
    """Why a D-Loop drafter of this mode, other than "refine", is refused."""
    mend = 'use mode "refine", or serve the backbone without dflash_config.dloop'
    return Finding.error("loop-mode", "dflash_config.dloop.mode", mode, "this mode is not served yet", mend)


def served_prefix_lengths(config: DraftConfig | LoopConfig, k: int) -> tuple[tuple[int, ...], list[Finding]]:
    """The D-Loop prefix lengths that make sense when K proposals are served; the others are dropped and named."""
    loop = config.loop if isinstance(config, DraftConfig) else config
    lengths = loop.prefix_lengths if loop is not None and loop.mode == "refine" else ()
    kept = tuple(m for m in lengths if m < k)
    dropped = [m for m in lengths if m >= k]
    if not dropped:
        return kept, []
    message = f"{dropped} are dropped: a prefix must be shorter than the {k} proposals served"
    mend = f"serve more proposals, or train with prefix lengths below {k}"
    key = "dflash_config.dloop.prefix_lengths"
    return kept, [Finding.of(WARNING, "loop-prefix-dropped", key, list(lengths), message, mend)]


def served_mode(config: DraftConfig, prefix_lengths: Sequence[int]) -> str:
    """How a block is drafted, in words; ``prefix_lengths`` are those that are served."""
    choice = "independent slots" if config.selector is None else "selector walk"
    loop = config.loop
    return f"one pass, {choice}" if loop is None else f"{loop.mode} {list(prefix_lengths)}, {choice}"


def served_facts(config: DraftConfig, k: int, prefix_lengths: Sequence[int]) -> str:
    """Method, mode, K and what the block looks like, for the line that an adapter logs."""
    causal = "causal" if all(config.causal) else "mixed" if any(config.causal) else "bidirectional"
    return (
        f"method {config.method}, mode {served_mode(config, prefix_lengths)}, K {k} (trained for {config.k}), "
        f"{config.num_layers} {causal} layers on target layers {list(config.target_layer_ids)}"
    )


_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "half": "float16", "float": "float32"}


def dtype_name(name: str | None) -> str | None:
    """``float16``, ``bfloat16``, ``float32``, ... from any of the names in use (F16, torch.bfloat16, half)."""
    return None if name is None else _NAMES.get(name.removeprefix("torch."), name.removeprefix("torch."))


def read_tokenizer_vocabulary(directory: Path) -> dict[str, int] | None:
    """Token to id of ``tokenizer.json``, else of ``vocab.json``, added tokens included; None where neither says so."""
    whole, old, more = (directory / name for name in ("tokenizer.json", "vocab.json", "added_tokens.json"))
    if whole.is_file():
        raw = read_json(whole)
        model, added = raw.get("model"), raw.get("added_tokens")
        known = list(_pieces(model.get("vocab") if isinstance(model, dict) else None))
        known += (
            [(t.get("content"), t.get("id")) for t in added if isinstance(t, dict)] if isinstance(added, list) else []
        )
    else:
        known = [pair for file in (old, more) if file.is_file() for pair in read_json(file).items()]
    return {token: i for token, i in known if isinstance(token, str) and is_int(i)} or None


def _pieces(vocab: Any) -> Iterator[tuple[Any, Any]]:
    """Of a mapping from token to id, or of a list whose places are the ids."""
    if isinstance(vocab, dict):
        yield from vocab.items()
    elif isinstance(vocab, list):
        yield from ((entry[0], i) for i, entry in enumerate(vocab) if isinstance(entry, list) and entry)
