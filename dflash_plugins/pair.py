"""Checks that need more than the drafter's own configuration: the target, the served K, the dtype, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_plugins.config import DraftConfig, LoopConfig, TargetConfig
from dflash_plugins.config_places import read_json
from dflash_plugins.findings import Finding, Severity

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def pair_findings(
    draft: DraftConfig | Mapping[str, Any], target: TargetConfig, *, own_embedding: bool | None = None
) -> list[Finding]:
    """Whether a drafter fits a target.

    ``draft`` is a description or the facts of an incomplete one (``DraftReading.facts``); what is missing is not
    checked. ``own_embedding`` says whether the checkpoint ships its own token embedding (None: not known).
    """
    facts = draft.model_dump() if isinstance(draft, DraftConfig) else draft
    return [
        *_width_findings(facts, target, own_embedding),
        *_layer_findings(facts, target),
        *_vocabulary_findings(facts, target),
        *_theta_findings(facts, target),
    ]


def _width_findings(facts: Mapping[str, Any], target: TargetConfig, own: bool | None) -> list[Finding]:
    found = []
    features, hidden = facts.get("target_hidden_size"), facts.get("hidden_size")
    if features is not None and features != target.hidden_size:
        found.append(
            Finding.error(
                "pair-hidden-size",
                "target_hidden_size",
                features,
                f"the target's residual stream is {target.hidden_size} wide, so fc does not fit its features",
                "use the target the drafter was trained for",
            )
        )
    elif hidden is not None and hidden != target.hidden_size and own is False:
        found.append(
            Finding.error(
                "pair-hidden-size",
                "hidden_size",
                hidden,
                f"the drafter shares the target's embedding, which is {target.hidden_size} wide",
                "use the target the drafter was trained for",
            )
        )
    return found


def _layer_findings(facts: Mapping[str, Any], target: TargetConfig) -> list[Finding]:
    found = []
    layers, ids = facts.get("num_target_layers"), facts.get("target_layer_ids") or ()
    if layers is not None and layers != target.num_layers:
        message = f"the target has {target.num_layers} layers"
        mend = "use the target the drafter was trained for"
        found.append(Finding.error("pair-target-layers", "num_target_layers", layers, message, mend))
    wrong = [i for i in ids if not 0 <= i < target.num_layers]
    if wrong:
        message = f"{wrong} are no layers of a target with {target.num_layers}"
        mend = "use the target the drafter was trained for, or check whether the ids are speculators' (one higher)"
        found.append(Finding.error("target-layer-range", "target_layer_ids", list(ids), message, mend))
    return found


def _vocabulary_findings(facts: Mapping[str, Any], target: TargetConfig) -> list[Finding]:
    found = []
    vocab, mask = facts.get("vocab_size"), facts.get("mask_token_id")
    if vocab is not None and vocab != target.vocab_size:
        message = f"the target's embedding has {target.vocab_size} rows: a drafter for another vocabulary"
        mend = "use the target the drafter was trained for"
        found.append(Finding.error("pair-vocabulary", "vocab_size", vocab, message, mend))
    if mask is not None and mask >= target.vocab_size:
        message = f"lies beyond the {target.vocab_size} rows of the target's embedding"
        mend = "set an id inside the embedding; one past the tokenizer's last is fine"
        found.append(Finding.error("mask-token-range", "mask_token_id", mask, message, mend))
    special = {*target.eos_token_ids, *(() if target.pad_token_id is None else (target.pad_token_id,))}
    if mask in special:
        message = "is the target's end or padding token as well"
        mend = "make sure the drafter was trained with this id as its mask"
        found.append(Finding.of(WARNING, "mask-token-shared", "mask_token_id", mask, message, mend))
    return found


def _theta_findings(facts: Mapping[str, Any], target: TargetConfig) -> list[Finding]:
    theta = facts.get("rope_theta")
    if theta is None or target.rope_theta is None or theta == target.rope_theta:
        return []
    ratio = max(theta, target.rope_theta) / min(theta, target.rope_theta)
    message = f"the target has {target.rope_theta:g}, a ratio of {ratio:g}"
    mend = "check the drafter's training configuration: a wrong theta is silent and costs accepted tokens"
    return [Finding.of(WARNING, "pair-rope-theta", "rope_theta", theta, message, mend)]


def k_findings(config: DraftConfig, k: int | None) -> list[Finding]:
    """Whether K proposals per round suit the trained block."""
    # Mode extend drafts block after block: the engine's K is then a multiple of the block's.
    blocks = config.loop.max_loops if config.loop is not None and config.loop.mode == "extend" else 1
    most = config.k * blocks
    if k is None or k in (config.k, most):
        return []
    if k < 1:
        return [Finding.error("k-range", "k", k, "is no number of proposals", f"give 1 to {most}")]
    if k > most:
        message = f"goes beyond the trained block of {config.block_size}; acceptance may collapse at every slot"
        return [Finding.of(WARNING, "k-beyond-block", "k", k, message, f"serve at most {most}")]
    if k > config.k:
        message = f"is no whole number of blocks of {config.k} proposals"
        return [Finding.of(WARNING, "k-part-block", "k", k, message, f"serve a multiple of {config.k}")]
    message = f"is less than the {config.k} proposals of the trained block; fewer masks change every proposal"
    return [Finding.of(INFO, "k-below-block", "k", k, message, f"{config.k} is what the drafter was trained with")]


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


def serving_dtype_findings(stored: str | None, served: str | None) -> list[Finding]:
    """Whether weights stored as one dtype may be served as another; names as in ``dtype_name``."""
    stored, served = dtype_name(stored), dtype_name(served)
    if stored is None or served in (None, "auto", stored):
        return []
    if served == "float16":
        message = f"serves {stored} weights as float16: features beyond 65504 become infinite and drafts are lost"
        return [Finding.error("dtype-range", "dtype", served, message, f"serve {stored} or float32")]
    severity = INFO if served == "float32" else WARNING
    return [
        Finding.of(severity, "dtype-cast", "dtype", served, f"weights are stored as {stored}", f"{stored} is exact")
    ]


def tokenizer_findings(target: Mapping[str, int], draft: Mapping[str, int]) -> list[Finding]:
    """Whether two vocabularies (token to id) agree on every id that both have room for; a longer tail is padding."""
    ours, theirs = ({i: t for t, i in v.items()} for v in (target, draft))
    rows = min(max(ours, default=-1), max(theirs, default=-1)) + 1
    differing = [i for i in range(rows) if ours.get(i) != theirs.get(i)]
    if not differing:
        return []
    shown = ", ".join(f"{i} ({ours.get(i)!r} in the target, {theirs.get(i)!r} in the drafter)" for i in differing[:8])
    message = f"{len(differing)} ids mean different tokens: {shown}{', ...' if len(differing) > 8 else ''}"
    mend = "use the target the drafter was trained for"
    return [Finding.error("pair-tokenizer", "tokenizer.json", differing, message, mend)]


def read_tokenizer_vocabulary(directory: Path) -> dict[str, int] | None:
    """Token to id of ``tokenizer.json``, added tokens included; None when the directory ships none."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    raw = read_json(file)
    vocab = raw.get("model", {}).get("vocab", {})
    known = dict(vocab) if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
    return known | {t["content"]: t["id"] for t in raw.get("added_tokens", ())}
